"""The one loop over the head: chunks of rows through logits, statistics and gradients.

All schedules run this loop. Without a callback it is the forward. A callback may overwrite a
chunk's logits with gradients, so that forward and backward share one GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.backends import (
    OutputSpec,
    RowStats,
    StatsGrad,
    Tile,
    TileGradient,
    concatenate,
    mean_logits,
    with_top_k,
)
from grpo_kernels.batch import host
from grpo_kernels.engine.compaction import FEWEST, LEAST_SHARE
from grpo_kernels.engine.invariance import prove_same_bits
from grpo_kernels.engine.masked_rows import MaskedRows
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Rows, Selection, narrowed, ranges
from grpo_kernels.engine.shards import merge_vocab_shards
from grpo_kernels.head import leading_dim, matmul_precision, project

_TILE_ROWS = 512  # on a GPU, tiles have a multiple of this many rows


class Chunk(NamedTuple):
    """A range of a call's rows with their logits in memory, and their statistics."""

    part: slice  # the range
    rows: Rows
    logits: Tensor  # (C, V), may be overwritten
    stats: RowStats
    masked: MaskedRows | None = None  # with a sampling mask
    # the gradient of the log-probabilities, which replaces logits that are read once
    gradient: TileGradient | None = None
    selection: Selection = Selection()  # the remaining rows of the range

    @property
    def tile(self) -> Tile:
        return Tile(self.logits, self.rows.target, self.rows.head.transform)

    def compacted(self, grad_stats: StatsGrad) -> tuple[Chunk, StatsGrad]:
        """Drop the rows without a gradient, if that pays, and move the n others to the front.

        As few rows move as possible. On a GPU the host would wait for n, so no row is dropped.
        """
        nonzero = grad_stats.nonzero
        if nonzero is None or not host.reading_is_free(nonzero):
            return self, grad_stats
        flags = host.values(nonzero)
        count, total = sum(flags), len(flags)
        if total - count < max(FEWEST, total * LEAST_SHARE):
            return self, grad_stats
        later = iter([row for row in range(count, total) if flags[row]])
        order = [place if flags[place] else next(later) for place in range(count)]
        for place, row in enumerate(order):
            if place != row:
                self.logits[place].copy_(self.logits[row])
        index = torch.tensor(order, dtype=torch.int64)  # may be empty
        chunk = Chunk(
            part=self.part,
            rows=self.rows.select(index),
            logits=self.logits[:count],
            stats=self.stats.rows(index),
            masked=None if self.masked is None else self.masked.select(index),
            selection=Selection(index, total),
        )
        return chunk, grad_stats.rows(index)


def row_chunks(rows: int, route: Route) -> list[slice]:
    """Cut rows evenly into as few ranges as tiles allow: small GEMMs are slow."""
    return ranges(rows, chunk_height(rows, route.tile_rows, route.block))


def chunk_height(rows: int, size: int, block: int) -> int:
    """Return the rows per range of :func:`row_chunks`; the last range may have fewer."""
    even = -(-rows // max(1, -(-rows // size)))
    return max(1, min(size, -(-even // block) * block))


def tile_height(rows: int, most: int, device: torch.device) -> int:
    """Return the rows of a tile for chunks of at most ``rows`` (at most ``most``).

    On a GPU there are few sizes per head, so that the allocator can reuse blocks.
    """
    if device.type == "cpu":
        return rows
    return max(rows, min(most, -(-rows // _TILE_ROWS) * _TILE_ROWS))


def new_tile(route: Route, height: int) -> Tensor:
    """Return an uninitialized tile for chunks of at most ``height`` rows."""
    rows = tile_height(route.fixed_rows or height, route.tile_rows, route.device)
    shape = rows, leading_dim(route.columns, route.tile_dtype, route.device)
    tile = torch.empty(shape, dtype=route.tile_dtype, device=route.device)
    return tile if shape[1] == route.columns else tile[:, : route.columns]


def forward(rows: Rows, route: Route, outputs: OutputSpec = OutputSpec()) -> RowStats:  # noqa: B008
    """Compute the statistics of every row."""
    with matmul_precision(route.device, route.precision):
        if route.has_tile:
            return chunked_loop(rows, route, row_chunks(rows.count, route), outputs)
        rows = rows.local()
        stats = route.backend.linear_stats(
            hidden=rows.hidden,
            head=rows.head,
            target=rows.local_target,
            precision=route.precision,
            extras=outputs.extras,
        )
    return stats if rows.head.shard is None else merge_vocab_shards(stats, rows)


def chunked_loop(
    rows: Rows,
    route: Route,
    chunks: Sequence[slice],  # of the rows, in order, without gaps
    outputs: OutputSpec = OutputSpec(),  # noqa: B008
    consume: Callable[[Chunk], object] | None = None,
    with_gradient: bool = False,
) -> RowStats:
    """Compute the statistics of every row; call it under :func:`matmul_precision`.

    ``consume`` is called with each chunk. ``with_gradient``: chunks have the gradient of their
    log-probabilities instead of logits.
    """
    rows = rows.local().ready()
    buffer = new_tile(route, max((part.stop - part.start for part in chunks), default=0))
    stats = list[RowStats]()
    for part in chunks:
        if with_gradient:
            chunk = _form_gradient(rows, part, buffer, route)
        else:
            chunk = form_logits(rows=rows, part=part, buffer=buffer, route=route, outputs=outputs)
        if consume is not None:
            consume(chunk)
        stats.append(chunk.stats)
    if not stats:
        stats.append(
            form_logits(
                rows=rows, part=slice(0, 0), buffer=buffer, route=route, outputs=outputs
            ).stats
        )
    return concatenate(stats)


def _form_gradient(rows: Rows, part: slice, buffer: Tensor, route: Route) -> Chunk:
    """Compute a range's statistics, and the gradient of its log-probabilities in ``buffer``."""
    rows = rows.select(part)
    first = slice(0, rows.count)
    logits = narrowed(buffer, first)
    if route.exponentials:
        stats, gradient = route.backend.linear_logp_gradient(
            rows.hidden, rows.head, rows.target, logits
        )
    else:
        projected = narrowed(_project(rows, buffer, route).logits, first)
        tile = Tile(projected, rows.target, rows.head.transform)
        stats, gradient = route.backend.logp_gradient_(tile)
    return Chunk(part, rows, logits, stats, gradient=gradient)


def form_logits(
    rows: Rows,
    part: slice,
    buffer: Tensor,
    route: Route,
    outputs: OutputSpec,
) -> Chunk:
    """Compute the raw logits of a range of rows in ``buffer``, and their statistics."""
    rows = rows.select(part)
    first = slice(0, rows.count)
    shard = rows.head.shard
    if route.forms_logits:
        logits = narrowed(buffer, first)
        stats = route.backend.linear_stats(
            hidden=rows.hidden,
            head=rows.head,
            target=rows.local_target,
            precision="fp32",
            extras=outputs.extras,
            logits=logits,
        )
    else:
        projected = _project(rows, buffer, route)
        logits = narrowed(projected.logits, first)
        stats = route.backend.stats(projected, outputs.extras).rows(first)
    if shard is not None:
        stats = merge_vocab_shards(stats, rows)
    tile = Tile(logits, rows.target, rows.head.transform)
    masked = None
    if rows.sampling_mask is not None:
        masked = MaskedRows.of(tile, rows.sampling_mask, shard)
        stats = stats._replace(masked_logprobs=masked.logprobs.to(stats.logprobs.dtype))
    if outputs.mean:
        stats = stats._replace(mean_logit=mean_logits(tile, shard))
    if outputs.top_k:
        stats = with_top_k(tile, stats, outputs.top_k, shard)
    return Chunk(part=part, rows=rows, logits=logits, stats=stats, masked=masked)


def _project(rows: Rows, buffer: Tensor, route: Route) -> Tile:
    """Compute the raw logits of rows in ``buffer``, zero-padded to the route's fixed rows.

    How a library multiplies a row depends on the number of rows and on their memory layout. With
    ``fixed_rows`` both are always the same, so the row's bits are, too.
    """
    if route.fixed_rows is not None:
        rows = _pad_rows(rows, route.fixed_rows)
        prove_same_bits(rows.head, buffer[: rows.count], route.precision)
    logits = project(rows.hidden, rows.head, narrowed(buffer, slice(0, rows.count)))
    return Tile(logits, rows.local_target, rows.head.transform)


def _pad_rows(rows: Rows, height: int) -> Rows:
    def padded(x: Tensor, value: float = 0) -> Tensor:
        return pad(x, (0, 0) * (x.dim() - 1) + (0, height - len(x)), value=value)

    head = rows.head
    transform = rows.head.transform
    if isinstance(transform.temperature, Tensor):
        transform = replace(transform, temperature=padded(transform.temperature, value=1))
        head = replace(head, transform=transform)
    return replace(rows, hidden=padded(rows.hidden), target=padded(rows.target), head=head)
