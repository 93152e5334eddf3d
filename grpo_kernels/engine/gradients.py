"""The gradients of a head's inputs, summed from tiles of the gradient of its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends import RowStats, StatsGrad, Tile, TileGradient
from grpo_kernels.batch import host
from grpo_kernels.engine.lora import LoRAGradients
from grpo_kernels.engine.masked_rows import MaskedRows
from grpo_kernels.engine.needs import (
    Gradients,
    MainGrad,
    Needs,
    add_product,
    add_to_rows,
    new_gradients,
)
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Rows, narrowed, ranges
from grpo_kernels.head import SLICE_COLUMNS, accumulate

if TYPE_CHECKING:
    from torch.distributed import Work

# A row that moves is read and written once, V values each; in the two GEMMs it would have cost
# 4 D V operations. So any move pays, but a GEMM over a few rows less is not always faster, and a
# move costs the host a few operations.
_LEAST_SHARE, _FEWEST = 1 / 16, 16


def fp16_scale(outer: StatsGrad) -> Tensor | None:
    """Return the power of two, (), that brings the largest to 1/2 to 1; None for no values.

    Without it fp16 gradients of small losses underflow, and those of huge ratios overflow; above 1
    large hidden states would that are multiplied with them.
    """
    largest = [x.abs().amax().float() for x in outer if x is not None and x.numel()]
    if not largest:
        return None
    exponent = -torch.log2(torch.stack(largest).amax().clamp(min=2.0**-100)).ceil()
    return torch.exp2(exponent.clamp(-100, 100))


class Chunk(NamedTuple):
    """A range of rows whose logits are there, and what is known of them."""

    rows: Rows
    logits: Tensor  # (C, V), may be overwritten
    stats: RowStats
    masked: MaskedRows | None = None  # with a sampling mask

    @property
    def tile(self) -> Tile:
        return Tile(self.logits, self.rows.target, self.rows.head.transform)

    def compacted(self, wanted: Tensor | None) -> tuple[Chunk, Tensor | None]:
        """Return the ``wanted`` rows (C,), moved to the beginning of the tile, and which they are.

        The n rows take the first n places. Those that lie there stay, the others fill the gaps: so
        the fewest move. All stay, and it is None, where too few would be left out, and on a GPU,
        where the host would have to wait for ``n``.
        """
        if wanted is None or not host.reading_is_free(wanted):
            return self, None
        flags = host.values(wanted)
        count, total = sum(flags), len(flags)
        if total - count < max(_FEWEST, total * _LEAST_SHARE):
            return self, None
        later = iter([row for row in range(count, total) if flags[row]])
        rows = [place if flags[place] else next(later) for place in range(count)]
        for place, row in enumerate(rows):
            if place != row:
                self.logits[place].copy_(self.logits[row])
        order = torch.tensor(rows, dtype=torch.int64)  # there may be none
        masked = None if self.masked is None else self.masked.at(order)
        of_rows = self.rows.at(order), self.logits[:count], self.stats.rows(order), masked
        return Chunk(*of_rows), order


class TileGradients:
    """What becomes of the gradients of tiles of logits."""

    def take(self, chunk: Chunk, outer: StatsGrad, route: Route) -> None:
        """Take a chunk, whose statistics have the gradients ``outer``."""
        raise NotImplementedError

    def finish(self) -> Gradients:
        """Return the gradients of the head's inputs; nothing is taken afterwards."""
        return Gradients()


class GradientSums(TileGradients):
    """Sums by GEMMs over tiles: of ranges of rows with all columns, or slice by slice of these."""

    def __init__(self, rows: Rows, needs: Needs, num_ranges: int, sliced: bool = False) -> None:
        """Make sums for the ranges of ``rows``; see :func:`new_gradients`."""
        self._sums, self._weight_dtype = new_gradients(rows, needs, num_ranges, sliced)
        self._slice: Tensor | None = None  # of the weight's sum, if it is rounded afterwards
        self._lora = LoRAGradients(rows, needs)
        self._main_grad: MainGrad | None = needs.main_grad if needs.weight else None
        self._num_rows, self._num_columns = rows.count, len(rows.head.weight)
        self._shard = rows.head.shard
        self._over_ranks: list[Work] = []
        self._is_fp16 = rows.hidden.dtype == torch.float16
        self._scale: Tensor | None = None  # () contained in all sums, divided out at the end

    def take(self, chunk: Chunk, outer: StatsGrad, route: Route) -> None:
        """Add the share of a chunk's rows that have a gradient."""
        outer = self.scaled(outer)
        chunk, order = chunk.compacted(outer.nonzero)
        outer = outer if order is None else outer.rows(order)
        out_dtype = chunk.rows.hidden.dtype
        dlogits = route.backend.dlogits_(chunk.tile, chunk.stats, outer, out_dtype)
        if chunk.masked is not None and outer.dmasked is not None:
            chunk.masked.add_gradient_(dlogits, outer.dmasked)
        self.add(TileGradient(dlogits), chunk.rows)

    def scaled(self, outer: StatsGrad) -> StatsGrad:
        """Multiply a chunk's coefficients by the scale that fp16 needs, which never rises.

        What is summed already follows where it falls: to a huge importance ratio, for example.
        """
        scale = fp16_scale(outer) if self._is_fp16 else None
        if scale is None:
            return outer
        if self._scale is not None:
            scale = torch.minimum(scale, self._scale)
            factor = scale / self._scale
            if not host.reading_is_free(factor) or factor.item() != 1:
                self._wait()
                self._times_(factor, *self._lora.sums)
        self._scale = scale
        return outer.times(scale)

    def add(self, gradient: TileGradient, rows: Rows, columns: slice | None = None) -> None:
        """Add the share of a tile, in the dtype of the hidden states.

        ``rows`` are those of its range that have a gradient, with the head of its ``columns``.
        """
        columns = slice(0, self._num_columns) if columns is None else columns
        dlogits, sums = gradient.dlogits, self._sums
        if sums.hidden is not None:
            place, is_first = narrowed(sums.hidden, rows.part), columns.start == 0
            add_to_rows(place, gradient, rows, rows.head.weight, is_first)
            if self._shard is not None and columns.stop == self._num_columns:
                self._over_ranks.append(self._shard.start_sum(place))  # beside GEMMs that follow
        if self._main_grad is not None:
            place = narrowed(self._main_grad.total, columns)
            self._add_to_main_grad(place, dlogits, gradient.weighted(rows.hidden))
        if sums.weight is not None:
            place = narrowed(sums.weight, columns)
            self._add_to_weight(place, dlogits, gradient.weighted(rows.hidden), rows.part)
        if sums.bias is not None:
            self._add_to_bias(narrowed(sums.bias, columns), gradient)
        self._lora.add(gradient, rows, columns)

    def finish(self) -> Gradients:
        """Return the gradients; nothing is added afterwards."""
        self._wait()
        self._sums = self._lora.complete(self._sums)
        if self._scale is not None:
            self._times_(1 / self._scale)
        return self._sums

    def _wait(self) -> None:
        """Wait until the gradients of the hidden states are summed over the ranks."""
        for work in self._over_ranks:
            work.wait()
        self._over_ranks.clear()

    def _times_(self, factor: Tensor, *others: Tensor | None) -> None:
        for x in (*self._sums, *others):
            if x is not None and x.dtype != torch.float16:  # of a slice that has been rounded
                x.mul_(factor)

    def _add_to_weight(self, place: Tensor, dlogits: Tensor, hidden: Tensor, part: slice) -> None:
        """Sum a slice in its place, or apart, to be rounded once the last range is there."""
        total = place
        if place.dtype != self._weight_dtype:
            if self._slice is None:
                self._slice = torch.empty_like(place, dtype=self._weight_dtype)
            total = self._slice
        accumulate(total, dlogits.t(), hidden, first=part.start == 0)
        if self._slice is not None and part.stop == self._num_rows:
            place.copy_(total if self._scale is None else total.div_(self._scale))
            self._slice = None

    def _add_to_main_grad(self, place: Tensor, dlogits: Tensor, hidden: Tensor) -> None:
        """Add without the scale; no second tensor of the size of the weight exists."""
        if self._scale is None:
            accumulate(place, dlogits.t(), hidden, first=False)
            return
        for part in ranges(len(place), SLICE_COLUMNS):
            add_product(place[part], dlogits[:, part].t(), hidden, False, 1 / self._scale)

    @staticmethod
    def _add_to_bias(dbias: Tensor, gradient: TileGradient) -> None:
        dlogits, factor = gradient
        if factor is None:
            dbias.add_(torch.sum(dlogits, 0, dtype=dbias.dtype))
        else:
            high = factor.to(dlogits.dtype)  # the factor in two parts: a sum hides no rounding
            parts = torch.stack([high, (factor - high).to(dlogits.dtype)], 1)
            sums = dbias.new_empty(dbias.shape[0], 2)
            accumulate(sums, dlogits.t(), parts, first=True)
            dbias.add_(sums.sum(1))
