"""The rows of a call that matter, with a target and a gradient: the others enter no product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import grpo_kernels.batch.host as host
from grpo_kernels.batch.packing import IGNORE_INDEX
from grpo_kernels.batch.sampling_mask import SamplingMask
from grpo_kernels.head.checks import check_target_range
from grpo_kernels.head.head import Head


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Hidden states with what belongs to them, T rows or some of them."""

    hidden: Tensor  # (T, D)
    head: Head
    target: Tensor  # (T,)
    sampling_mask: SamplingMask | None = None
    index: Tensor | None = None  # which rows these are of all, None: all of them
    total: int = 0  # how many all are

    def valid(self, wanted: Tensor | None = None) -> Rows:
        """The rows with a target that are ``wanted`` (T,), None: those with a target.

        One host transfer, and one more for a sampling mask.

        Raises:
            ValueError: a target is outside of the vocabulary.
        """
        if self.target.numel() == 0:
            return self
        valid = self.target != IGNORE_INDEX
        inside = torch.where(valid, self.target, 0)
        matter = valid if wanted is None else valid & wanted
        found = torch.stack([inside.amin(), inside.amax(), matter.sum()])
        low, high, count = host.fetch(found)
        check_target_range(low, high, self.head.weight.shape[0])
        return self._where(matter, count)

    def chosen(self, wanted: Tensor | None = None) -> Rows:
        """The ``wanted`` rows of some that all have a target; all where a look would have to wait.

        So this needs no host transfer.
        """
        if wanted is None or not host.reading_is_free(wanted):
            return self
        return self._where(wanted, int(wanted.sum()))

    def _where(self, mask: Tensor, count: int) -> Rows:
        total = self.target.numel()
        if count == total:
            return self
        keep = torch.argsort(~mask, stable=True)[:count]
        return replace(
            self,
            hidden=self.hidden[keep],
            head=self.head.rows(keep),
            target=self.target[keep],
            sampling_mask=self.sampling_mask.take(keep) if self.sampling_mask is not None else None,
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
