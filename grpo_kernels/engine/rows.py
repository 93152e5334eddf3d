"""The rows of a call that matter, with a target and a gradient: the others enter no GEMM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.batch import IGNORE_INDEX, SamplingMask, host
from grpo_kernels.head import Head, check_mask_range, check_row_temperature, check_target_range


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Hidden states with what belongs to them, T rows or some of them."""

    hidden: Tensor  # (T, D)
    head: Head
    target: Tensor  # (T,)
    sampling_mask: SamplingMask | None = None
    index: Tensor | None = None  # which rows these are of all, None: all of them
    total: int = 0  # how many all are

    @property
    def count(self) -> int:
        return self.target.numel()

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """What may get a gradient: the hidden states and the tensors of the head."""
        return (self.hidden, *self.head.tensors)

    @property
    def belongings(self) -> tuple[Tensor | None, ...]:
        """The tensors beside :attr:`inputs`."""
        temperature, mask = self.head.transform.temperature, self.sampling_mask
        of_mask = (None, None) if mask is None else (mask.indices, mask.offsets)
        return self.target, temperature if isinstance(temperature, Tensor) else None, *of_mask

    def valid(self, wanted: Tensor | None = None) -> Rows:
        """Return the rows with a target that are ``wanted`` (T,); None: all with a target.

        One host transfer, and one more for a sampling mask.

        Raises:
            ValueError: a target or an id of a sampling mask is outside of the vocabulary, or a
                temperature is not positive.
        """
        self.check_values()
        if not self.count:
            return self
        valid = self.target != IGNORE_INDEX
        inside = torch.where(valid, self.target, 0)
        matter = valid if wanted is None else valid & wanted
        found = host.sync_to_host(torch.stack([*inside.aminmax(), matter.sum()]))
        low, high, count = host.values(found)
        check_target_range(low, high, self.head.vocab_size)
        return self._where(matter, count)

    def chosen(self, wanted: Tensor | None = None) -> Rows:
        """Return the ``wanted`` rows of those with a target; all where looking would have to wait.

        So this needs no host transfer.
        """
        if wanted is None or not host.reading_is_free(wanted):
            return self
        return self._where(wanted, int(wanted.sum()))

    def check_values(self) -> None:
        """Raise ValueError for values that the host can see without a wait."""
        temperature = self.head.transform.temperature
        check_row_temperature(temperature if isinstance(temperature, Tensor) else None)
        if self.sampling_mask is not None:
            check_mask_range(self.sampling_mask.max_id, self.head.vocab_size)

    def ready(self) -> Rows:
        """Return the same with a head that is ready for GEMMs with the hidden states."""
        return replace(self, head=self.head.to(self.hidden.dtype))

    def local(self) -> Rows:
        """Return the same with columns of this rank's weight as targets and ids of the mask.

        A target that is another rank's is in none of them.
        """
        shard, mask = self.head.shard, self.sampling_mask
        if shard is None:
            return self
        if mask is not None:
            mask = mask.narrow(shard.start, shard.start + shard.columns)
        return replace(self, target=self.target - shard.start, sampling_mask=mask)

    def narrow(self, part: slice) -> Rows:
        """Return a range of rows as if they were all."""
        if part == slice(0, self.count):
            return self if self.index is None else replace(self, index=None, total=0)
        return self._at(part)

    def at(self, order: Tensor) -> Rows:
        """Return the rows ``order``, int64."""
        return self._at(order, index=order, total=self.count)

    def _where(self, mask: Tensor, count: int) -> Rows:
        if count == self.count:
            return self
        return self.at(torch.argsort(~mask, stable=True)[:count])

    def _at(self, rows: slice | Tensor, **which: Any) -> Rows:
        mask, hidden = self.sampling_mask, self.hidden
        return Rows(
            hidden=hidden[rows] if isinstance(rows, slice) else hidden.index_select(0, rows),
            head=self.head.rows(rows),
            target=self.target[rows],
            sampling_mask=mask.take(rows) if mask is not None else None,
            **which,
        )

    def take(self, values: Tensor | None) -> Tensor | None:
        """Return the (all, ...) values at these rows."""
        return values if values is None or self.index is None else values[self.index]

    def scatter(self, values: Tensor) -> Tensor:
        """Put these rows' values back among all rows; the others are 0."""
        if self.index is None:
            return values
        whole = values.new_zeros((self.total, *values.shape[1:]))
        return whole.index_copy(0, self.index, values)


# A row that moves is read and written once, V values each; in the two GEMMs it would have cost
# 4 D V operations. So any move pays, but a GEMM over a few rows less is not always faster, and a
# move costs the host a few operations.
_LEAST_SHARE, _FEWEST = 1 / 16, 16


def compact_plan(wanted: Tensor | None) -> list[int] | None:
    """Return which row each place of a tile takes over, of (C,) bool; None: the tile stays.

    The n wanted rows take the first n places. Those that lie there stay, the others fill the gaps:
    so the fewest rows move. On a GPU nothing moves, since the host would have to wait for ``n``.
    """
    if wanted is None or not host.reading_is_free(wanted):
        return None
    flags = host.values(wanted)
    count, total = sum(flags), len(flags)
    if total - count < max(_FEWEST, total * _LEAST_SHARE):
        return None
    later = iter([row for row in range(count, total) if flags[row]])
    return [place if flags[place] else next(later) for place in range(count)]


def compact_rows_(tile: Tensor, order: list[int]) -> Tensor:
    """Move the rows ``order`` of a (C, V) tile to its beginning, and return them."""
    for place, row in enumerate(order):
        if place != row:
            tile[place].copy_(tile[row])
    return tile[: len(order)]
