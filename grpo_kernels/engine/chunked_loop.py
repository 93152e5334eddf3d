"""The one loop over the head: chunks of rows through logits, statistics and gradients.

Every schedule is this loop. By itself it is the forward; whoever takes the chunks may turn their
logits into gradients while they are there, so forward and backward share one GEMM.
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
from grpo_kernels.engine.rows import Rows, narrowed, ranges
from grpo_kernels.engine.shards import merge_vocab_shards
from grpo_kernels.head import leading_dim, matmul_precision, project

_TILE_ROWS = 512  # tiles of a GPU have multiples of so many rows


class Chunk(NamedTuple):
    """A range of rows whose logits are there, and what is known of them."""

    rows: Rows
    logits: Tensor  # (C, V), may be overwritten
    stats: RowStats
    masked: MaskedRows | None = None  # with a sampling mask
    gradient: TileGradient | None = None  # of logp, in place of the logits if they are read once

    @property
    def tile(self) -> Tile:
        return Tile(self.logits, self.rows.target, self.rows.head.transform)

    def compacted(self, grad_stats: StatsGrad) -> tuple[Chunk, StatsGrad]:
        """Drop the rows without a gradient, if that pays; the n others move to the tile's first n.

        Those that lie there stay, so that the fewest move; on a GPU the host would wait for n.
        """
        wanted = grad_stats.nonzero
        if wanted is None or not host.reading_is_free(wanted):
            return self, grad_stats
        flags = host.values(wanted)
        count, total = sum(flags), len(flags)
        if total - count < max(FEWEST, total * LEAST_SHARE):
            return self, grad_stats
        later = iter([row for row in range(count, total) if flags[row]])
        order = [place if flags[place] else next(later) for place in range(count)]
        for place, row in enumerate(order):
            if place != row:
                self.logits[place].copy_(self.logits[row])
        index = torch.tensor(order, dtype=torch.int64)  # there may be none
        masked = None if self.masked is None else self.masked.at(index)
        chunk = Chunk(self.rows.at(index), self.logits[:count], self.stats.rows(index), masked)
        return chunk, grad_stats.rows(index)


def row_chunks(rows: int, route: Route) -> list[slice]:
    """Cut rows into as few ranges as tiles allow, evenly: small GEMMs are slow."""
    return ranges(rows, chunk_height(rows, route.tile_rows, route.block))


def chunk_height(rows: int, size: int, block: int) -> int:
    """Return the rows of each range of :func:`row_chunks` but the last, which may have fewer."""
    even = -(-rows // max(1, -(-rows // size)))
    return max(1, min(size, -(-even // block) * block))


def tile_height(rows: int, most: int, device: torch.device) -> int:
    """Return the rows of a tile for chunks of at most ``rows``, themselves at most ``most``.

    On a GPU there are few sizes of it per head, so that the allocator finds an old one again.
    """
    if device.type == "cpu":
        return rows
    return max(rows, min(most, -(-rows // _TILE_ROWS) * _TILE_ROWS))


def new_tile(route: Route, height: int) -> Tensor:
    """Return an uninitialised tile for chunks of at most ``height`` rows."""
    rows = tile_height(route.fixed_rows or height, route.tile_rows, route.device)
    shape = rows, leading_dim(route.columns, route.tile_dtype, route.device)
    tile = torch.empty(shape, dtype=route.tile_dtype, device=route.device)
    return tile if shape[1] == route.columns else tile[:, : route.columns]


def forward(rows: Rows, route: Route, wanted: OutputSpec = OutputSpec()) -> RowStats:  # noqa: B008
    """Compute the statistics of every row."""
    with matmul_precision(route.device, route.precision):
        if route.has_tile:
            return chunked_loop(rows, route, row_chunks(rows.count, route), wanted)
        rows = rows.local()
        given = rows.hidden, rows.head, rows.local_target, route.precision, wanted.extras
        stats = route.backend.linear_stats(*given)
    return stats if rows.head.shard is None else merge_vocab_shards(stats, rows)


def chunked_loop(
    rows: Rows,
    route: Route,
    chunks: Sequence[slice],  # of the rows, in order, without gaps
    wanted: OutputSpec = OutputSpec(),  # noqa: B008
    take: Callable[[Chunk], object] | None = None,
    with_gradient: bool = False,
) -> RowStats:
    """Compute statistics of every row, inside of :func:`matmul_precision`.

    ``take`` is given each chunk; ``with_gradient``: and with it the gradient of ``logp``, which is
    all that is left of the logits.
    """
    rows = rows.local().ready()
    buffer = new_tile(route, max((part.stop - part.start for part in chunks), default=0))

    def run(part: slice) -> RowStats:
        of_part = rows.narrow(part)
        if with_gradient:
            chunk = _with_gradient(of_part, buffer, route)
        else:
            chunk = formed(of_part, buffer, route, wanted)
        if take is not None:
            take(chunk)
        return chunk.stats

    found = [run(part) for part in chunks]
    return concatenate(found or [formed(rows, buffer, route, wanted).stats])


def _with_gradient(rows: Rows, buffer: Tensor, route: Route) -> Chunk:
    """Compute the statistics of a range along with the gradient of ``logp``, in ``buffer``."""
    tile = narrowed(buffer, slice(0, rows.count))
    if route.exponentials:
        stats, gradient = route.backend.linear_logp_gradient(
            rows.hidden, rows.head, rows.target, tile
        )
    else:
        logits = narrowed(_project(rows, buffer, route).logits, slice(0, rows.count))
        formed_tile = Tile(logits, rows.target, rows.head.transform)
        stats, gradient = route.backend.logp_gradient_(formed_tile)
    return Chunk(rows, tile, stats, gradient=gradient)


def formed(rows: Rows, buffer: Tensor, route: Route, wanted: OutputSpec) -> Chunk:
    """Form the raw logits of a range in ``buffer``, and their statistics."""
    part, shard = slice(0, rows.count), rows.head.shard
    if route.forms_logits:
        logits = narrowed(buffer, part)
        given = rows.hidden, rows.head, rows.local_target, "fp32", wanted.extras
        stats = route.backend.linear_stats(*given, logits)
    else:
        filled = _project(rows, buffer, route)
        logits, stats = narrowed(filled.logits, part), route.backend.stats(filled, wanted.extras)
        stats = stats.rows(part)
    stats = stats if shard is None else merge_vocab_shards(stats, rows)
    tile, masked = Tile(logits, rows.target, rows.head.transform), None
    if rows.sampling_mask is not None:
        masked = MaskedRows.of(tile, rows.sampling_mask, shard)
        stats = stats._replace(masked_logprobs=masked.logp.to(stats.logprobs.dtype))
    if wanted.mean:
        stats = stats._replace(mean_logit=mean_logits(tile, shard))
    if wanted.top_k:
        stats = with_top_k(tile, stats, wanted.top_k, shard)
    return Chunk(rows, logits, stats, masked)


def _project(rows: Rows, buffer: Tensor, route: Route) -> Tile:
    """Form the raw logits of a range in ``buffer``, and of the zeros that fill it up.

    How a library multiplies a row depends on the number of rows, and on where they lie in memory.
    With ``fixed_rows`` both are always the same, and so are the row's bits.
    """
    if route.fixed_rows is not None:
        rows = _filled_up(rows, route.fixed_rows)
        prove_same_bits(rows.head, buffer[: rows.count], route.precision)
    logits = project(rows.hidden, rows.head, narrowed(buffer, slice(0, rows.count)))
    return Tile(logits, rows.local_target, rows.head.transform)


def _filled_up(rows: Rows, height: int) -> Rows:
    def filled(x: Tensor, value: float = 0) -> Tensor:
        return pad(x, (0, 0) * (x.dim() - 1) + (0, height - len(x)), value=value)

    head, transform = rows.head, rows.head.transform
    if isinstance(transform.temperature, Tensor):
        transform = replace(transform, temperature=filled(transform.temperature, value=1))
        head = replace(head, transform=transform)
    return replace(rows, hidden=filled(rows.hidden), target=filled(rows.target), head=head)
