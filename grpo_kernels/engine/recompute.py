"""Gradients from saved statistics, a slice of the vocabulary at a time.

The logits of a slice are formed again, turned into their gradient in place and multiplied. A slice
of dweight is one GEMM over all rows, rounded once, and dhidden is summed in fp32: there is no
fp32 (V, D) buffer, and the tile of logits is as small as asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_kernels.backends import RowStats, StatsGrad, Tile, TileGradient
from grpo_kernels.engine.chunked_loop import chunk_height, ranges
from grpo_kernels.engine.gradients import Gradients, Needs, fp16_scale
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Rows
from grpo_kernels.head import (
    Head,
    accumulate,
    leading_dim,
    matmul_precision,
    project,
    stats_dtype,
    zero_row_padding,
)

if TYPE_CHECKING:
    from torch.distributed import Work

# Narrower slices starve the GEMMs, wider ones gain nothing.
_MIN_COLUMNS, _MAX_COLUMNS = 2048, 16384
_ALIGNMENT = 128


@dataclass(frozen=True, kw_only=True)
class Slices:
    """The ranges of rows and slices of the vocabulary."""

    rows: list[slice]
    columns: list[slice]

    @property
    def longest_rows(self) -> int:
        return _longest(self.rows)

    @property
    def longest_columns(self) -> int:
        return _longest(self.columns)


def cut(rows: int, columns: int, max_local_vocab: int, elements: int, block: int) -> Slices:
    """Cut rows and columns into tiles of :func:`tile_shape`, for the rank with the most columns."""
    height, width = tile_shape(rows, max_local_vocab, elements, block)
    return Slices(rows=ranges(rows, height), columns=ranges(columns, width))


def tile_shape(rows: int, columns: int, elements: int, block: int) -> tuple[int, int]:
    """Take all rows and as many columns as make a tile of ``elements``; if too few, fewer rows."""
    width = min(max(elements // max(rows, 1), _MIN_COLUMNS), _MAX_COLUMNS)
    width = min(width // _ALIGNMENT * _ALIGNMENT, columns)
    return chunk_height(rows, max(1, min(rows, elements // max(width, 1))), block), width


def recompute_backward(
    rows: Rows,
    stats: RowStats,  # of these rows
    outer: StatsGrad,
    route: Route,
    needs: Needs,
) -> Gradients:
    """Compute the gradients of hidden, weight, bias and an adapter."""
    rows = rows.local()
    hidden, whole, shard = rows.hidden, rows.head.to(rows.hidden.dtype), rows.head.shard
    scale = fp16_scale(outer) if hidden.dtype == torch.float16 else None
    size = rows.count, route.columns, route.max_local_vocab
    slices = cut(*size, route.tile_rows * route.max_local_vocab, route.block)
    pitch = leading_dim(slices.longest_columns, route.logits, route.device)
    buffer = hidden.new_empty((slices.longest_rows, pitch), dtype=route.logits)
    work = _Work(rows, stats, outer.times(scale), route, buffer)
    results, lora = _zeros(hidden, rows.head, needs), needs.lora(rows)
    sums: list[Work] = []
    with matmul_precision(hidden.device, route.precision):
        for columns in slices.columns:
            head = whole.columns(columns)
            dweight = _place(results.weight, columns, hidden.dtype, len(slices.rows))
            for part in slices.rows:
                dlogits = work.dlogits(part, head, columns)
                if results.hidden is not None:
                    zero_row_padding(dlogits)
                    accumulate(results.hidden[part], dlogits, head.weight, columns.start == 0)
                    if shard is not None and columns.stop == route.columns:
                        sums.append(shard.start_sum(results.hidden[part]))
                if dweight is not None:
                    accumulate(dweight, dlogits.t(), hidden[part], part.start == 0)
                if needs.weight and needs.main_grad is not None:
                    needs.main_grad.add(dlogits, hidden[part], columns, scale)
                if lora is not None:
                    lora.add(TileGradient(dlogits), part, columns)
                if results.bias is not None:
                    results.bias[columns] += torch.sum(dlogits, 0, dtype=results.bias.dtype)
            if dweight is not None and results.weight is not None:
                _store(results.weight[columns], dweight, scale)
        for over_ranks in sums:
            over_ranks.wait()
        results = results.with_lora(lora)
    for result in (results.hidden, results.bias, results.lora_a, results.lora_b):
        if result is not None and scale is not None:
            result.div_(scale)
    return results


@dataclass(frozen=True)
class _Work:
    rows: Rows
    stats: RowStats
    outer: StatsGrad
    route: Route
    buffer: Tensor  # as large as the largest tile

    def dlogits(self, part: slice, head: Head, columns: slice) -> Tensor:
        """Compute the gradient of the raw logits of some rows and columns, in the buffer."""
        hidden, head, backend = self.rows.hidden[part], head.rows(part), self.route.backend
        logits = self.buffer[: hidden.shape[0], : head.weight.shape[0]]
        # relative to the slice; the target of another slice is in none of its columns
        target = self.rows.target[part] - columns.start
        if self.route.forms_logits:
            # as the forward formed them: what was rounded in another way is an error here
            backend.linear_stats(hidden, head, target, "fp32", False, logits)
        else:
            project(hidden, head, logits)
        tile = Tile(logits, target, head.transform)
        stats, outer = self.stats.rows(part), self.outer.rows(part)
        return backend.dlogits_(tile, stats, outer, hidden.dtype)


def _zeros(hidden: Tensor, head: Head, needs: Needs) -> Gradients:
    def make(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=hidden.device)

    wide = stats_dtype(hidden.dtype)
    return Gradients(
        make(hidden.shape, wide) if needs.hidden else None,
        make(head.weight.shape, wide if needs.wide else head.weight.dtype)
        if needs.new_weight
        else None,
        make(head.weight.shape[:1], wide) if needs.bias else None,
    )


def _place(
    dweight: Tensor | None, columns: slice, dtype: torch.dtype, num_parts: int
) -> Tensor | None:
    """Return where the GEMMs of a slice are summed: its place in the result, if nothing is lost."""
    if dweight is None or num_parts == 0:  # without rows the zeros stay
        return None
    place, wide = dweight[columns], stats_dtype(dtype)
    whole = place.dtype == wide or (place.dtype == dtype and num_parts == 1)
    direct = whole and dtype != torch.float16  # fp16 sums wait in fp32 for the loss scale
    return place if direct else torch.empty_like(place, dtype=wide)


def _store(place: Tensor, summed: Tensor, scale: Tensor | None) -> None:
    if scale is not None:
        summed.div_(scale)
    if summed.data_ptr() != place.data_ptr():
        place.copy_(summed)


def _longest(parts: list[slice]) -> int:
    return max((part.stop - part.start for part in parts), default=0)
