"""The rows of a call that carry a target: the others enter no product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.kept import KeptSet
from grpo_kernels.logprob.check import check_target_range
from grpo_kernels.logprob.head import Head
from grpo_kernels.packing import IGNORE_INDEX


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Hidden states with what belongs to them, T rows or the valid ones of them."""

    hidden: Tensor  # (T, D)
    head: Head
    target: Tensor  # (T,)
    kept: KeptSet | None = None
    index: Tensor | None = None  # which rows these are of all, None: all of them
    total: int = 0  # how many all are

    def valid(self) -> Rows:
        """The rows with a target; one host transfer, and one more for a kept set.

        Raises:
            ValueError: a target is outside of the vocabulary.
        """
        keep = _valid_rows(self.target, self.head.weight.shape[0])
        total = self.target.numel()
        if keep is None:
            return replace(self, total=total)
        return Rows(
            hidden=self.hidden[keep],
            head=self.head.rows(keep),
            target=self.target[keep],
            kept=self.kept.take(keep) if self.kept is not None else None,
            index=keep,
            total=total,
        )

    def take(self, values: Tensor | None) -> Tensor | None:
        """(all, ...) values of these rows."""
        return values if values is None or self.index is None else values[self.index]

    def spread(self, values: Tensor) -> Tensor:
        """These rows' values, put back among all rows; the others are 0."""
        if self.index is None:
            return values
        whole = values.new_zeros((self.total, *values.shape[1:]))
        return whole.index_copy(0, self.index, values)


def _valid_rows(target: Tensor, columns: int) -> Tensor | None:
    """Index of the rows that carry a target, None when all do; one host transfer."""
    if target.numel() == 0:
        return None
    valid = target != IGNORE_INDEX
    inside = torch.where(valid, target, 0)
    low, high, count = torch.stack([inside.amin(), inside.amax(), valid.sum()]).tolist()
    check_target_range(low, high, columns)
    if count == target.numel():
        return None
    return torch.argsort(~valid, stable=True)[:count]
