"""The one loop of the heavy part: chunks of rows through logits, statistics and gradients.

Every schedule is this loop. Without ``middle`` it is the forward; with it, each chunk's logits are
turned into gradients while they are there, so forward and backward share one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.backends.base import (
    FormsLogits,
    LinearStats,
    RowKernels,
    RowMiddle,
    RowStats,
    concatenate,
    dtype_of,
    shapes_of,
    stats_dtype,
)
from grpo_kernels.batch.sampling_mask import SamplingMask
from grpo_kernels.engine.compaction import move_rows_, surviving_rows
from grpo_kernels.engine.gradients import Chunk, Gradients, GradientSums, Needs, StatsGradients
from grpo_kernels.engine.sampling_mask import MaskedRows
from grpo_kernels.engine.topk import UNRANKED, Ranking
from grpo_kernels.head.head import Head, logits_dtype, project
from grpo_kernels.head.memory import on_huge_pages
from grpo_kernels.head.precision import products

Middle = Callable[[slice, RowStats], StatsGradients]  # of a row range and its statistics


@dataclass(frozen=True)
class Execution:
    """How the loop runs: which row kernels, which row ranges, which logits."""

    kernels: RowKernels
    chunks: Sequence[slice]  # of the T rows, in order, without gaps
    precision: str  # one of head.PRECISIONS
    extras: bool = False  # also is_top1, sum_sq_probs, max_logit and min_logit
    linear_stats: LinearStats | None = None  # forward without a tile of logits
    sampling_mask: SamplingMask | None = None  # also masked_logp
    ranking: Ranking = UNRANKED  # also the target's rank, the top k
    fixed_rows: int | None = None  # every tile is filled up to these rows with zeros


_BLOCK = 16  # rows of a product's innermost loop


def ranges(length: int, size: int) -> list[slice]:
    """``length`` in ranges of ``size``, the last one may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def row_chunks(rows: int, size: int) -> list[slice]:
    """As few ranges of at most ``size`` rows as can be, evenly: products of few rows are slow."""
    return ranges(rows, chunk_height(rows, size))


def chunk_height(rows: int, size: int) -> int:
    """Rows of all ranges of :func:`row_chunks` but the last, which may have fewer."""
    even = -(-rows // max(1, -(-rows // size)))
    return max(1, min(size, -(-even // _BLOCK) * _BLOCK))


def forward(
    hidden: Tensor,  # (T, D)
    head: Head,
    target: Tensor,  # (T,)
    execution: Execution,
) -> RowStats:
    """Statistics of every row."""
    if execution.linear_stats is not None:
        with products(hidden.device, execution.precision):
            return execution.linear_stats(
                hidden, head, target, execution.precision, execution.extras
            )
    stats, _ = _sweep(hidden, head, target, execution, None, Needs(False, False, False))
    return stats


def forward_backward(
    hidden: Tensor,  # (T, D)
    head: Head,
    target: Tensor,  # (T,)
    execution: Execution,
    middle: Middle | RowMiddle,
    needs: Needs,
) -> tuple[RowStats, Gradients]:
    """Statistics of every row and the gradients that ``middle`` asks for."""
    return _sweep(hidden, head, target, execution, middle, needs)


def _sweep(
    hidden: Tensor,
    head: Head,
    target: Tensor,
    execution: Execution,
    middle: Middle | RowMiddle | None,
    needs: Needs,
) -> tuple[RowStats, Gradients]:
    sums = GradientSums(hidden, head, needs, len(execution.chunks))
    head = head.to(hidden.dtype)
    height = max((chunk.stop - chunk.start for chunk in execution.chunks), default=0)
    shape = (execution.fixed_rows or height, head.weight.shape[0])
    tile = on_huge_pages(hidden.new_empty(shape, dtype=_tile_dtype(hidden, execution)))
    parts: list[RowStats] = []
    for rows in execution.chunks:
        chunk = Chunk(rows, hidden[rows], head.rows(rows), target[rows])
        stats, chunk, dlogits = _rows_pass(chunk, tile, execution, middle, sums)
        parts.append(stats)
        if dlogits is not None:
            with products(hidden.device, execution.precision):
                sums.add(dlogits, chunk)
    with products(hidden.device, execution.precision):
        gradients = sums.finish()
    return _all_stats(parts, hidden, execution), gradients


def _rows_pass(
    chunk: Chunk,
    tile: Tensor,
    execution: Execution,
    middle: Middle | RowMiddle | None,
    sums: GradientSums,
) -> tuple[RowStats, Chunk, Tensor | None]:
    """Logits of a chunk in ``tile`` and their statistics; with ``middle`` also their gradient.

    The gradient is that of the chunk's rows which have one.
    """
    transform, target, dtype = chunk.head.transform, chunk.target, chunk.rows.dtype
    if isinstance(middle, RowMiddle):
        logits = _product(chunk.rows, chunk.head, tile, execution)[: target.numel()]
        stats, dlogits = middle.gradient_(chunk.range, logits, target, transform, dtype)
        return stats, chunk, dlogits
    logits, stats = _logits(chunk.rows, chunk.head, target, tile, execution)
    sampling_mask = None
    if execution.sampling_mask is not None:
        sampling_mask = MaskedRows.of(
            logits, target, transform, execution.sampling_mask.take(chunk.range)
        )
        stats = stats._replace(masked_logp=sampling_mask.logp.to(stats.logp.dtype))
    if execution.ranking.wanted:
        stats = execution.ranking.of(logits, target, transform, stats)
    if middle is None:
        return stats, chunk, None
    outer = sums.scaled(middle(chunk.range, stats))
    return stats, *_dlogits(chunk, logits, stats, outer, sampling_mask, execution.kernels)


def _dlogits(
    chunk: Chunk,
    logits: Tensor,  # (C, V), overwritten
    stats: RowStats,
    outer: StatsGradients,
    sampling_mask: MaskedRows | None,
    kernels: RowKernels,
) -> tuple[Chunk, Tensor]:
    """The gradient of the raw logits of the rows that have one, and these rows."""
    order = surviving_rows(outer.nonzero)
    if order is not None:
        logits = move_rows_(logits, order)
        chunk, stats, outer = chunk.rows_at(order), stats.rows(order), outer.rows(order)
        sampling_mask = sampling_mask.at(order) if sampling_mask is not None else None
    dlogp, dentropy, dmasked = outer
    if dlogp is None:
        dlogp = torch.zeros_like(stats.logp)
    transform, dtype = chunk.head.transform, chunk.rows.dtype
    dlogits = kernels.dlogits_(logits, chunk.target, transform, stats, dlogp, dentropy, dtype)
    if sampling_mask is not None and dmasked is not None:
        sampling_mask.add_gradient_(dlogits, dmasked)
    return chunk, dlogits


def _tile_dtype(hidden: Tensor, execution: Execution) -> torch.dtype:
    return logits_dtype(hidden.dtype, execution.precision)


def _logits(
    rows: Tensor,  # (C, D)
    head: Head,  # of these rows
    target: Tensor,  # (C,)
    tile: Tensor,  # (at least C, V)
    execution: Execution,
) -> tuple[Tensor, RowStats]:
    """The raw logits (C, V) of a chunk, in ``tile``, and their statistics."""
    count, transform, kernels = rows.shape[0], head.transform, execution.kernels
    if isinstance(kernels, FormsLogits) and kernels.forms(rows.dtype, tile.dtype):
        logits = tile[:count]
        return logits, kernels.logits_stats(rows, head, target, execution.extras, logits)
    logits = _product(rows, head, tile, execution)
    if execution.fixed_rows is not None:
        target = _filled_up(target, execution.fixed_rows)
        if isinstance(transform.temperature, Tensor):
            temperature = _filled_up(transform.temperature, execution.fixed_rows, value=1)
            transform = replace(transform, temperature=temperature)
    stats = kernels.stats(logits, target, transform, execution.extras)
    return logits[:count], stats.rows(slice(count))


def _product(rows: Tensor, head: Head, tile: Tensor, execution: Execution) -> Tensor:
    """The raw logits of a chunk, and of the zeros that fill it up, in ``tile``.

    How a library multiplies a row depends on the number of rows, and on where they lie in memory.
    With ``fixed_rows`` both are always the same, and so are the row's bits.
    """
    if execution.fixed_rows is not None:
        rows = _filled_up(rows, execution.fixed_rows)
    with products(rows.device, execution.precision):
        return project(rows, head, tile[: rows.shape[0]])


def _filled_up(x: Tensor, rows: int, value: int = 0) -> Tensor:
    filled = x.new_full((rows, *x.shape[1:]), value)
    filled[: x.shape[0]] = x
    return filled


def _all_stats(parts: list[RowStats], hidden: Tensor, execution: Execution) -> RowStats:
    if parts:
        return concatenate(parts)
    wide, ranking = stats_dtype(hidden.dtype), execution.ranking
    shapes = shapes_of(
        torch.Size((0,)),
        extras=execution.extras,
        sampling_mask=execution.sampling_mask is not None,
        **ranking._asdict(),
    )
    none = {name: (shape, dtype_of(name, wide)) for name, shape in shapes.items()}
    return RowStats(
        **{name: hidden.new_empty(shape, dtype=dtype) for name, (shape, dtype) in none.items()}
    )
