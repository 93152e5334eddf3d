"""The gradients of a head's inputs, summed from tiles of the gradient of its logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import Backend, RowStats, StatsGrad, Tile, TileGradient, output_view
from grpo_kernels.batch import host
from grpo_kernels.engine.chunked_loop import Chunk, chunk_height, chunked_loop, row_chunks
from grpo_kernels.engine.compaction import moved_forward_
from grpo_kernels.engine.lora_gradients import LoRAGradients
from grpo_kernels.engine.products import add_to_rows, weighted
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Gradients, Needs, Rows, Selection, narrowed, ranges
from grpo_kernels.engine.weight_sum import WeightGrad, WeightSum
from grpo_kernels.head import (
    accumulate,
    leading_dim,
    matmul_precision,
    project,
    stats_dtype,
)

# Narrower slices starve the GEMMs, wider ones gain nothing.
_MIN_COLUMNS, _MAX_COLUMNS = 2048, 16384
_ALIGNMENT = 128


class GradientSums:
    """Sums of GEMMs over tiles: all columns of ranges of rows, or a slice of columns at a time."""

    def __init__(
        self,
        rows: Rows,
        needs: Needs,
        num_ranges: int,
        *,
        weight_grad: WeightGrad = WeightGrad(),  # noqa: B008
        sliced: bool = False,
    ) -> None:
        self._sums = new_gradients(rows, needs, num_ranges, sliced)
        self._weight: WeightSum | None = None
        if needs.weight:
            self._weight = WeightSum(
                weight=rows.head.weight,
                dtype=rows.hidden.dtype,
                num_rows=rows.count,
                num_ranges=num_ranges,
                grad=weight_grad,
                sliced=sliced,
            )
        self._lora: LoRAGradients | None = None
        if rows.head.lora is not None:
            self._lora = LoRAGradients(rows.head.lora, rows, needs)
        self._num_columns = rows.head.weight.shape[0]
        self._shard = rows.head.shard
        self._over_ranks: list[Any] = []  # sums over ranks in progress
        self._is_fp16 = rows.hidden.dtype == torch.float16
        self._scale: Tensor | None = None  # () contained in all sums, divided out at the end

    def add_chunk(self, chunk: Chunk, grad_stats: StatsGrad, route: Route) -> None:
        """Add a chunk, given the gradients of its rows' statistics."""
        if chunk.gradient is not None:
            assert grad_stats.dlogp is not None
            gradient = route.backend.weighted_gradient(chunk.gradient, grad_stats.dlogp)
            self.add(gradient, chunk.rows, chunk.part)
            return
        chunk, grad_stats = chunk.compacted(self.scaled(grad_stats))
        dlogits = output_view(chunk.logits, chunk.rows.hidden.dtype)
        route.backend.dlogits_(chunk.tile, chunk.stats, grad_stats, dlogits)
        if chunk.masked is not None and grad_stats.dmasked is not None:
            chunk.masked.add_gradient_(dlogits, grad_stats.dmasked)
        self.add(TileGradient(dlogits), chunk.rows, chunk.part, selection=chunk.selection)

    def scaled(self, grad_stats: StatsGrad) -> StatsGrad:
        """For fp16, scale coefficients by a power of two so that the largest is in (1/2, 1].

        Otherwise gradients of small losses underflow, and gradients of huge ratios overflow; above
        1, products with large hidden states would overflow, too. The scale never increases; if it
        decreases, the sums so far are rescaled.
        """
        present = [x for x in grad_stats if x is not None and x.numel()]
        if not self._is_fp16 or not present:
            return grad_stats
        largest = [x.abs().amax().float() for x in present]
        exponent = -torch.log2(torch.stack(largest).amax().clamp(min=2.0**-100)).ceil()
        scale = torch.exp2(exponent.clamp(-100, 100))
        if self._scale is not None:
            scale = torch.minimum(scale, self._scale)
            factor = scale / self._scale
            if not host.reading_is_free(factor) or factor.item() != 1:
                self._wait()
                _multiply_(self._sums, factor)
                if self._weight is not None:
                    _multiply_([self._weight.result], factor)
                if self._lora is not None:
                    _multiply_([self._lora.dinner, self._lora.db], factor)
        self._scale = scale
        return grad_stats.times(scale)

    def add(
        self,
        gradient: TileGradient,  # in the dtype of the hidden states
        rows: Rows,  # of the tile, with the head of its columns
        part: slice,  # the range of the call's rows that the tile holds
        *,
        selection: Selection = Selection(),  # noqa: B008, the rows of the range that have a gradient
        columns: slice | None = None,  # None: all
    ) -> None:
        """Add a tile."""
        columns = slice(0, self._num_columns) if columns is None else columns
        sums = self._sums
        first = columns.start == 0
        if sums.hidden is not None:
            place = narrowed(sums.hidden, part)
            add_to_rows(place, gradient, rows.head.weight, selection, first=first)
            if self._shard is not None and columns.stop == self._num_columns:
                # overlaps with the next GEMMs
                self._over_ranks.append(self._shard.start_sum(place))
        if self._weight is not None:
            hidden = weighted(rows.hidden, gradient.row_scale)
            self._weight.add(gradient.dlogits, hidden, columns, part, scale=self._scale)
        if sums.bias is not None:
            self._add_to_bias(narrowed(sums.bias, columns), gradient)
        if self._lora is not None:
            self._lora.add(gradient, rows.hidden, part, selection=selection, columns=columns)

    def finish(self) -> Gradients:
        """Return the gradients; nothing may be added afterwards."""
        self._wait()
        if self._weight is not None:
            self._sums = self._sums._replace(weight=self._weight.result)
        if self._lora is not None:
            self._sums = self._lora.complete(self._sums)
        if self._scale is not None:
            _multiply_(self._sums, 1 / self._scale)
        return self._sums

    def _wait(self) -> None:
        """Wait until the gradients of the hidden states are summed over the ranks."""
        for work in self._over_ranks:
            work.wait()
        self._over_ranks.clear()

    @staticmethod
    def _add_to_bias(dbias: Tensor, gradient: TileGradient) -> None:
        dlogits, factor = gradient
        if factor is None:
            dbias.add_(torch.sum(dlogits, 0, dtype=dbias.dtype))
        else:
            high = factor.to(dlogits.dtype)  # in two parts, so that rounding the factor is exact
            parts = torch.stack([high, (factor - high).to(dlogits.dtype)], 1)
            sums = dbias.new_empty(dbias.shape[0], 2)
            accumulate(sums, dlogits.t(), parts, first=True)
            dbias.add_(sums.sum(1))


def _multiply_(sums: Iterable[Tensor | None], factor: Tensor) -> None:
    for x in sums:
        if x is not None and x.dtype == torch.float32:  # slices are already rounded
            x.mul_(factor)


def gradients_of_logp(
    rows: Rows,
    gradient: TileGradient,  # (T, V), of the log-probabilities with respect to the logits
    dlogp: Tensor,  # (T,)
    route: Route,
    needs: Needs,
    weight_grad: WeightGrad,
    nonzero: Tensor | None = None,  # (T,) bool, the rows to multiply; None: all
) -> Gradients:
    """Compute gradients from the gradient of all rows' log-probabilities.

    With ``nonzero`` the host waits for the number of rows, and some of these rows are copied over
    others in ``gradient``; a second call still finds all of them.
    """
    sums = GradientSums(rows, needs, 1, weight_grad=weight_grad)
    with matmul_precision(route.device, route.precision):
        factor = sums.scaled(StatsGrad(dlogp)).dlogp
        assert factor is not None
        if gradient.row_scale is None:
            gradient = TileGradient(gradient.dlogits, factor)
        else:
            gradient = route.backend.weighted_gradient(gradient, factor)
        part = slice(0, rows.count)
        selection = Selection()
        index = None if nonzero is None else moved_forward_(gradient.dlogits, nonzero)
        if index is not None:
            scale = gradient.row_scale
            assert scale is not None
            gradient = TileGradient(gradient.dlogits[: len(index)], scale[index])
            selection = Selection(index, rows.count)
        sums.add(gradient, rows.ready().selected(selection), part, selection=selection)
        return sums.finish()


def tile_shape(rows: int, columns: int, elements: int, block: int) -> tuple[int, int]:
    """Return (rows, columns) of a tile of ``elements``: all rows, unless columns get too few."""
    width = min(max(elements // max(rows, 1), _MIN_COLUMNS), _MAX_COLUMNS)
    width = min(width // _ALIGNMENT * _ALIGNMENT, columns)
    return chunk_height(rows, max(1, min(rows, elements // max(width, 1))), block), width


def recompute_backward(
    rows: Rows,
    stats: RowStats,
    grad_stats: StatsGrad,
    route: Route,
    needs: Needs,
    weight_grad: WeightGrad,
    selection: Selection = Selection(),  # noqa: B008
) -> Gradients:
    """Compute gradients from statistics and their gradients; logits are computed again.

    Rows that are not selected are never multiplied; their hidden states get a gradient of 0.
    """
    rows = rows.selected(selection)
    stats = RowStats(*stats.for_backward)
    if selection.index is not None:
        stats = stats.rows(selection.index)
        grad_stats = grad_stats.rows(selection.index)
    if rows.sampling_mask is None:
        gradients = _by_slices(
            rows=rows,
            stats=stats,
            grad_stats=grad_stats,
            route=route,
            needs=needs,
            weight_grad=weight_grad,
        )
    else:  # a mask's gradient needs the logits of all its ids at once
        chunks = row_chunks(rows.count, route)
        sums = GradientSums(rows, needs, len(chunks), weight_grad=weight_grad)

        def consume(chunk: Chunk) -> None:
            sums.add_chunk(chunk, grad_stats.rows(chunk.part), route)

        with matmul_precision(route.device, route.precision):
            chunked_loop(rows, route, chunks, consume=consume)
            gradients = sums.finish()
    if gradients.hidden is None:
        return gradients
    return gradients._replace(hidden=selection.scatter(gradients.hidden))


def _by_slices(
    rows: Rows,
    stats: RowStats,
    grad_stats: StatsGrad,
    route: Route,
    needs: Needs,
    weight_grad: WeightGrad,
) -> Gradients:
    """Compute gradients from these rows' statistics, one slice of the vocabulary at a time.

    The logits of a slice are computed again, overwritten by their gradient and multiplied. A slice
    of dweight is one GEMM over all rows, rounded once, and dhidden is summed in fp32: there is no
    fp32 (V, D) buffer, and the tile of logits is as small as requested.
    """
    # for the rank with the most columns
    elements = route.tile_rows * route.max_local_vocab
    height, width = tile_shape(rows.count, route.max_local_vocab, elements, route.block)
    parts = ranges(rows.count, height)
    slices = ranges(route.columns, width)
    sums = GradientSums(rows, needs, len(parts), weight_grad=weight_grad, sliced=True)
    grad_stats = sums.scaled(grad_stats)
    rows = rows.local().ready()
    pitch = leading_dim(min(width, route.columns), route.logits, route.device)
    buffer = rows.hidden.new_empty((min(height, rows.count), pitch), dtype=route.logits)
    with matmul_precision(route.device, route.precision):
        for columns in slices:
            head = rows.head.columns(columns)
            # targets relative to the slice; a target in another slice matches no column
            of_slice = replace(rows, head=head, target=rows.target - columns.start)
            for part in parts:
                tile_rows = of_slice.select(part)
                head = tile_rows.head
                logits = buffer[: tile_rows.count, : len(head.weight)]
                if route.forms_logits:
                    # exactly as in the forward: logits rounded differently would be an error
                    route.backend.linear_stats(
                        hidden=tile_rows.hidden,
                        head=head,
                        target=tile_rows.target,
                        precision="fp32",
                        extras=False,
                        logits=logits,
                    )
                else:
                    project(tile_rows.hidden, head, logits)
                tile = Tile(logits, tile_rows.target, head.transform)
                dlogits = output_view(logits, tile_rows.hidden.dtype)
                route.backend.dlogits_(tile, stats.rows(part), grad_stats.rows(part), dlogits)
                sums.add(TileGradient(dlogits), tile_rows, part, columns=columns)
        return sums.finish()


def new_gradients(rows: Rows, needs: Needs, num_ranges: int, sliced: bool = False) -> Gradients:
    """Return uninitialized gradients of hidden states and bias; zeros if there are no ranges.

    ``sliced``: dhidden is a sum over slices of the vocabulary. ``rows`` have the head before
    :meth:`Rows.ready`.
    """
    hidden, weight = rows.hidden, rows.head.weight
    wide = stats_dtype(hidden.dtype)
    dhidden, dbias = None, None
    if needs.hidden:
        # fp16 results stay in fp32 until the loss scale; partial results are summed over ranks
        is_final = hidden.dtype != torch.float16 and not sliced and rows.head.shard is None
        make = torch.empty if num_ranges else torch.zeros
        dtype = hidden.dtype if is_final else wide
        dhidden = make(hidden.shape, dtype=dtype, device=hidden.device)
    if needs.bias:
        dbias = torch.zeros(weight.shape[0], dtype=wide, device=hidden.device)
    return Gradients(hidden=dhidden, bias=dbias)


def scaled_(
    gradients: Gradients, scale: Tensor, inputs: Sequence[Tensor | None], backend: Backend
) -> Gradients:
    """Return ``gradients * scale``, rounded once to the inputs' dtypes; consumes ``gradients``."""
    if host.reading_is_free(scale) and scale.item() == 1:  # saves a pass, without a sync
        return gradients
    pairs = zip(gradients, inputs, strict=True)
    return Gradients(
        *(
            None if gradient is None or x is None else backend.scaled(gradient, scale, x.dtype)
            for gradient, x in pairs
        )
    )
