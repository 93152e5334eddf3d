"""Gradients from saved statistics, a slice of the vocabulary at a time.

The logits of a slice are formed again, turned into their gradient in place and multiplied. A slice
of dweight is one GEMM over all rows, rounded once, and dhidden is summed in fp32: there is no
fp32 (V, D) buffer, and the tile of logits is as small as asked.
"""

from __future__ import annotations

from dataclasses import replace

from grpo_kernels.backends import RowStats, StatsGrad, Tile, TileGradient
from grpo_kernels.engine.chunked_loop import chunk_height
from grpo_kernels.engine.gradients import GradientSums
from grpo_kernels.engine.needs import Gradients, Needs
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Rows, ranges
from grpo_kernels.head import leading_dim, matmul_precision, project

# Narrower slices starve the GEMMs, wider ones gain nothing.
_MIN_COLUMNS, _MAX_COLUMNS = 2048, 16384
_ALIGNMENT = 128


def tile_shape(rows: int, columns: int, elements: int, block: int) -> tuple[int, int]:
    """Take all rows and as many columns as make a tile of ``elements``; if too few, fewer rows."""
    width = min(max(elements // max(rows, 1), _MIN_COLUMNS), _MAX_COLUMNS)
    width = min(width // _ALIGNMENT * _ALIGNMENT, columns)
    return chunk_height(rows, max(1, min(rows, elements // max(width, 1))), block), width


def recompute_backward(
    rows: Rows, stats: RowStats, outer: StatsGrad, route: Route, needs: Needs
) -> Gradients:
    """Compute the gradients of hidden, weight, bias and an adapter from these rows' statistics."""
    # of the rank with the most columns
    elements = route.tile_rows * route.max_local_vocab
    height, width = tile_shape(rows.count, route.max_local_vocab, elements, route.block)
    parts, slices = ranges(rows.count, height), ranges(route.columns, width)
    sums = GradientSums(rows, needs, len(parts), sliced=True)
    outer, rows = sums.scaled(outer), rows.local().ready()
    pitch = leading_dim(min(width, route.columns), route.logits, route.device)
    buffer = rows.hidden.new_empty((min(height, rows.count), pitch), dtype=route.logits)
    with matmul_precision(route.device, route.precision):
        for columns in slices:
            head = rows.head.columns(columns)
            # relative to the slice; the target of another slice is in none of its columns
            of_slice = replace(rows, head=head, target=rows.target - columns.start)
            for part in parts:
                chunk = of_slice.narrow(part)
                hidden, head, target = chunk.hidden, chunk.head, chunk.target
                logits = buffer[: chunk.count, : len(head.weight)]
                if route.forms_logits:
                    # as the forward formed them: what was rounded in another way is an error here
                    route.backend.logits_stats(hidden, head, target, False, logits)
                else:
                    project(hidden, head, logits)
                tile, known = Tile(logits, target, head.transform), stats.rows(part)
                dlogits = route.backend.dlogits_(tile, known, outer.rows(part), hidden.dtype)
                sums.add(TileGradient(dlogits), chunk, columns)
        return sums.finish()
