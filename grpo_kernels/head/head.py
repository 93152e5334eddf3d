"""A linear head or its shard, its low-rank adapter, and the transform from logits to scores.

LoRA on the head (Hu et al., arXiv:2106.09685): ``W + s B A`` is never formed. With ``U = s X A^T``
(C, r), the logits are ``X W^T + U B^T``, summed in fp32. The gradients ``dU = dlogits B`` and
``dB = dlogits^T U`` walk over the vocabulary; ``dX += s dU A`` and ``dA = s dU^T X`` are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.common import gather, process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.device_mesh import DeviceMesh


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics, losses and metrics: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logits_dtype(dtype: torch.dtype, precision: str) -> torch.dtype:
    """Return the dtype in which logits are stored: never 16 bits for ``precision="fp32"``."""
    return dtype if precision == "input" or dtype == torch.float64 else torch.float32


def emptied(x: Tensor) -> Tensor:
    """Return a tensor without rows that, unlike a slice, does not share the memory of ``x``."""
    return x.new_empty((0, *x.shape[1:]))


@dataclass(frozen=True)
class Transform:
    """The map from logits to scores: ``z = softcap * tanh(scale * logit / softcap) / T``.

    Without ``softcap``, ``z = scale * logit / T``. ``temperature`` is a float, or a (C,) tensor
    with one value per row, in the dtype of the statistics.
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
    """A LoRA adapter of a linear head: ``logits = X W^T + scaling * (X A^T) B^T``.

    The factors may have any floating-point dtype. The forward does not round them to the head's
    dtype, not even under autocast. Gradients flow to both. LoRA: arXiv:2106.09685.
    """

    a: Tensor  # (r, D)
    b: Tensor  # (V, r)
    scaling: float = 1.0

    @staticmethod
    def joined(adapters: Sequence[HeadLoRA]) -> HeadLoRA | None:
        """Return one adapter equal to the sum of all, differentiable in each; None for none."""
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
        """The rank r of the factors."""
        return self.a.shape[0]

    def wide(self, dtype: torch.dtype) -> HeadLoRA:
        """Return the adapter in fp32, or fp64 for hidden states (``dtype``) in fp64."""
        wide = stats_dtype(dtype)
        return replace(self, a=self.a.to(wide), b=self.b.to(wide))

    def columns(self, index: slice) -> HeadLoRA:
        """Return the adapter for a range of the vocabulary."""
        return replace(self, b=self.b[index])

    def project_down(self, hidden: Tensor) -> Tensor:
        """Return ``U = s X A^T`` (C, r) for hidden states (C, D); the factors are wide."""
        rows = hidden.to(self.a.dtype)
        # autocast does not touch GEMMs with out=
        out = self.a.new_empty(hidden.shape[0], self.rank)
        return torch.mm(rows, self.a.t(), out=out).mul_(self.scaling)


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """The part of the vocabulary in this rank's (V_r, D) weight. Build it once, with :meth:`of`.

    All ranks have the same hidden states and targets, and exchange a few numbers per row. These are
    gathered and then reduced in the order of the ranks, so that all get the same bits. The object
    holds only numbers and a name, so it can go through ``torch.compile``.
    """

    group: str  # name of the process group
    rank: int  # rank of this process in the group
    rows: tuple[int, ...]  # rows of each rank's weight, padding included
    vocab_size: int  # V: later ids are padding, and have no probability

    @staticmethod
    def of(
        group: ProcessGroup | DeviceMesh, weight: Tensor, vocab_size: int | None = None
    ) -> VocabShard:
        """Describe a weight that is split by rows over the ranks of ``group``, in their order.

        A collective: call it on all ranks of the group, once per head.

        Args:
            group: a process group, or a one-dimensional device mesh.
            weight: (V_r, D), this rank's rows; V_r may differ between ranks. Or a DTensor (V, D)
                that is sharded over a mesh dimension with this group.
            vocab_size: number of ids in use, if the last rows are padding; None: all.

        Raises:
            ValueError: on every rank: this process is not in the group, the ranks disagree on D,
                on the dtype or on ``vocab_size``, or a rank holds only padding.
        """
        group = process_group("group", group)
        if weight.dim() != 2:
            raise ValueError(f"weight: expected shape (V / n, D), got {tuple(weight.shape)}")
        rank = dist.get_rank(group)
        held = weight.shape[0]
        if hasattr(weight, "device_mesh"):  # rows per rank as torch splits them
            each = -(-held // dist.get_world_size(group))
            held = min(max(held - rank * each, 0), each)
        size = -1 if vocab_size is None else int(vocab_size)
        facts = {"D of weight": weight.shape[1], "bytes of weight's dtype": weight.dtype.itemsize}
        facts |= {"vocab_size": size, "rows": held}
        mine = torch.tensor(list(facts.values()), device=weight.device)
        *alike, rows = gather(mine, group).t().tolist()
        for name, values in zip(facts, alike, strict=False):
            if len(set(values)) > 1:
                raise ValueError(f"vocab_shard: expected ranks that agree on {name}, got {values}")
        total = sum(rows) if vocab_size is None else vocab_size
        empty = [i for i, held in enumerate(rows) if sum(rows[:i]) >= total or not held]
        if not 0 < total <= sum(rows) or empty:
            raise ValueError(
                f"vocab_size: expected at most {sum(rows)} (rows of the weights: {rows}), with ids "
                f"on every rank, got {total}"
            )
        name = group.group_name
        return VocabShard(group=name, rank=rank, rows=tuple(rows), vocab_size=total)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def start(self) -> int:
        """This rank's first id."""
        return sum(self.rows[: self.rank])

    @property
    def columns(self) -> int:
        """The number of this rank's ids."""
        return min(self.start + self.rows[self.rank], self.vocab_size) - self.start

    @property
    def max_local_vocab(self) -> int:
        """The largest number of ids on a rank. All ranks use it to cut rows in the same way."""
        return max(self.rows)

    def owns(self, columns: Tensor) -> Tensor:
        """Return which ids (relative to :attr:`start`) are this rank's; bool of the same shape."""
        return (columns >= 0) & (columns < self.columns)

    def gather(self, mine: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have one shape, as (n, ...) in rank order."""
        return gather(mine, self._group)

    def start_sum(self, x: Tensor) -> Work:
        """Start summing a contiguous tensor over the ranks, in place; ``wait()`` completes it."""
        return dist.all_reduce(x, group=self._group, async_op=True)

    @property
    def _group(self) -> ProcessGroup:
        return dist.distributed_c10d._resolve_process_group(self.group)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Head:
    """A linear head: ``logits = hidden @ weight.T + bias``, plus LoRA's update, then the transform.

    With 16-bit hidden states (autocast), ``weight`` may be fp32: it is multiplied in the dtype of
    the hidden states and still gets an fp32 gradient.
    """

    weight: Tensor  # (V, D)
    bias: Tensor | None = None  # (V,)
    transform: Transform = field(default_factory=Transform)  # torch 2.10: no object as a default
    lora: HeadLoRA | None = None
    shard: VocabShard | None = None  # which ids this rank holds; None: all

    @property
    def vocab_size(self) -> int:
        """V, over all ranks that share the vocabulary."""
        return self.weight.shape[0] if self.shard is None else self.shard.vocab_size

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The tensors that may get a gradient: weight, bias, and the adapter's A and B."""
        factors = (None, None) if self.lora is None else (self.lora.a, self.lora.b)
        return (self.weight, self.bias, *factors)

    def with_tensors(
        self,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
    ) -> Head:
        """Return the same head with these :attr:`tensors`."""
        lora = self.lora
        if lora is not None and lora_a is not None and lora_b is not None:
            lora = replace(lora, a=lora_a, b=lora_b)
        return replace(self, weight=weight, bias=bias, lora=lora)

    def without_tensors(self) -> Head:
        """Return the same head with empty :attr:`tensors`, which keep no memory alive."""
        weight, *others = self.tensors
        return self.with_tensors(emptied(weight), *(x if x is None else emptied(x) for x in others))

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
