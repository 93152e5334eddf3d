"""LoRA on the LM head (Hu et al., arXiv:2106.09685): a low-rank update of its logits.

``W + s B A`` is never formed. With ``U = s X A^T`` (C, r), the logits are ``X W^T + U B^T``. The
update is computed in fp32 and added to fp32 logits: one that is too small to change a 16-bit weight
counts in full. Of the gradients, ``dU = dlogits B`` and ``dB = dlogits^T U`` walk over the
vocabulary; ``dX += s dU A`` and ``dA = s dU^T X`` are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.backends.base import stats_dtype


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
        """One adapter that is the sum of all, differentiable in each; None for none."""
        if len(adapters) < 2:
            return adapters[0] if adapters else None
        wide = torch.float32
        for factor in (x for one in adapters for x in (one.a, one.b)):
            wide = torch.promote_types(wide, factor.dtype)
        return HeadLoRA(
            a=torch.cat([one.a.to(wide) for one in adapters]),
            b=torch.cat([one.b.to(wide) * one.scaling for one in adapters], 1),
        )

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def wide(self, dtype: torch.dtype) -> HeadLoRA:
        """The same, as products with hidden states of ``dtype`` want it: fp32, or fp64."""
        wide = stats_dtype(dtype)
        return replace(self, a=self.a.to(wide), b=self.b.to(wide))

    def columns(self, index: slice) -> HeadLoRA:
        """The same for a range of the vocabulary."""
        return replace(self, b=self.b[index])

    def inner(self, hidden: Tensor) -> Tensor:
        """``U = s X A^T`` (C, r) of hidden states (C, D); the factors are wide."""
        rows = hidden.to(self.a.dtype)
        # with out=, which autocast leaves alone
        out = self.a.new_empty(hidden.shape[0], self.rank)
        return torch.mm(rows, self.a.t(), out=out).mul_(self.scaling)

    def add_to(self, logits: Tensor, hidden: Tensor) -> None:
        """Adds the update of hidden states (C, D) to wide logits (C, V)."""
        torch.addmm(logits, self.inner(hidden), self.b.t(), out=logits)
