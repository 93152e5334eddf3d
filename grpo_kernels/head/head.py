"""What makes logits: a linear head, its low-rank adapter, and the transform to scores.

LoRA on the head (Hu et al., arXiv:2106.09685): ``W + s B A`` is never formed. With ``U = s X A^T``
(C, r), the logits are ``X W^T + U B^T``, summed in fp32. Of the gradients, ``dU = dlogits B`` and
``dB = dlogits^T U`` walk over the vocabulary; ``dX += s dU A`` and ``dA = s dU^T X`` are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from grpo_kernels.head.vocab_shard import VocabShard

PRECISIONS = ("fp32", "input", "tf32")


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics, losses and metrics: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logits_dtype(dtype: torch.dtype, precision: str) -> torch.dtype:
    """Return the dtype that logits are stored in: never 16 bits for ``precision="fp32"``."""
    return dtype if precision == "input" or dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Transform:
    """Logits to the distribution's scores: ``z = softcap * tanh(scale * logit / softcap) / T``.

    Without ``softcap``, ``z = scale * logit / T``. ``temperature`` is a float, or a ``(C,)`` tensor
    of the statistics dtype with one value per row.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0

    def rows(self, index: slice | Tensor) -> Transform:
        """Return the same transform for a subset of rows."""
        own = self.temperature
        return replace(self, temperature=own[index]) if isinstance(own, Tensor) else self


@dataclass(frozen=True, kw_only=True)
class HeadLoRA:
    """An adapter of a linear head: ``logits = X W^T + scaling * (X A^T) B^T``.

    The factors may be of any floating dtype, whatever that of the head; they are not rounded to the
    head's in the forward, under autocast neither. Gradients flow to both.
    """

    a: Tensor  # (r, D)
    b: Tensor  # (V, r)
    scaling: float = 1.0

    @staticmethod
    def joined(adapters: Sequence[HeadLoRA]) -> HeadLoRA | None:
        """Return one adapter that is the sum of all, differentiable in each; None for none."""
        if len(adapters) < 2:
            return adapters[0] if adapters else None
        dtypes = (x.dtype for one in adapters for x in (one.a, one.b))
        wide = reduce(torch.promote_types, dtypes, torch.float32)
        return HeadLoRA(
            a=torch.cat([one.a.to(wide) for one in adapters]),
            b=torch.cat([one.b.to(wide) * one.scaling for one in adapters], 1),
        )

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def wide(self, dtype: torch.dtype) -> HeadLoRA:
        """Return the same in the dtype for GEMMs with hidden states of ``dtype``: fp32, or fp64."""
        wide = stats_dtype(dtype)
        return replace(self, a=self.a.to(wide), b=self.b.to(wide))

    def columns(self, index: slice) -> HeadLoRA:
        """Return the same for a range of the vocabulary."""
        return replace(self, b=self.b[index])

    def inner(self, hidden: Tensor) -> Tensor:
        """Return ``U = s X A^T`` (C, r) of hidden states (C, D); the factors are wide."""
        rows = hidden.to(self.a.dtype)
        # with out=, which autocast leaves alone
        out = self.a.new_empty(hidden.shape[0], self.rank)
        return torch.mm(rows, self.a.t(), out=out).mul_(self.scaling)

    def add_to(self, logits: Tensor, hidden: Tensor) -> None:
        """Add the update of hidden states (C, D) to wide logits (C, V)."""
        torch.addmm(logits, self.inner(hidden), self.b.t(), out=logits)


@dataclass(frozen=True)
class Head:
    """A linear head: ``logits = hidden @ weight.T + bias``, an update by LoRA, then the transform.

    ``weight`` may be fp32 under 16-bit hidden states (autocast); it is then multiplied in the
    dtype of the hidden states and still gets an fp32 gradient.
    """

    weight: Tensor  # (V, D)
    bias: Tensor | None = None  # (V,)
    transform: Transform = field(default_factory=Transform)  # torch 2.10 compiles no object
    lora: HeadLoRA | None = None
    shard: VocabShard | None = None  # which ids these are; None: all

    @property
    def vocab_size(self) -> int:
        """V, of all ranks that share the vocabulary."""
        return self.weight.shape[0] if self.shard is None else self.shard.vocab_size

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """What may get a gradient: weight, bias, and A and B of the adapter."""
        factors = (None, None) if self.lora is None else (self.lora.a, self.lora.b)
        return (self.weight, self.bias, *factors)

    def with_tensors(
        self, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None
    ) -> Head:
        """Return the same head with these in place of :attr:`tensors`."""
        lora = self.lora
        if lora is not None and lora_a is not None and lora_b is not None:
            lora = replace(lora, a=lora_a, b=lora_b)
        return replace(self, weight=weight, bias=bias, lora=lora)

    def rows(self, index: slice | Tensor) -> Head:
        """Return the same head for a subset of rows."""
        return replace(self, transform=self.transform.rows(index))

    def columns(self, index: slice) -> Head:
        """Return the same head for a range of its ids."""
        bias = None if self.bias is None else self.bias[index]
        lora = None if self.lora is None else self.lora.columns(index)
        return replace(self, weight=self.weight[index], bias=bias, lora=lora)

    def to(self, dtype: torch.dtype) -> Head:
        """Return the same head, ready for GEMMs with hidden states of ``dtype``."""
        lora = None if self.lora is None else self.lora.wide(dtype)
        return replace(self, weight=self.weight.to(dtype), lora=lora)
