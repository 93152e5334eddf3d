"""The one loop over the head: chunks of rows through logits, statistics and gradients.

Every schedule is this loop. Without a stage it is the forward; with one, each chunk's logits are
turned into gradients while they are there, so forward and backward share one GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends import (
    OutputSpec,
    RowStats,
    StatsGrad,
    Tile,
    concatenate,
    dtype_of,
    mean_logits,
    shapes_of,
    with_top_k,
)
from grpo_kernels.engine.gradients import Chunk, Gradients, GradientSums, TileGradients
from grpo_kernels.engine.invariance import prove_same_bits
from grpo_kernels.engine.masked_rows import MaskedRows
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Rows
from grpo_kernels.engine.shards import local_target, merge_vocab_shards
from grpo_kernels.head import (
    Transform,
    leading_dim,
    matmul_precision,
    project,
    stats_dtype,
)

Stage = Callable[[slice, RowStats], StatsGrad]  # of a row range and its statistics

_TILE_ROWS = 512  # tiles of a GPU have multiples of so many rows


def ranges(length: int, size: int) -> list[slice]:
    """Cut ``length`` into consecutive ranges of at most ``size``."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


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
    shape = rows, leading_dim(route.columns, route.logits, route.device)
    tile = torch.empty(shape, dtype=route.logits, device=route.device)
    return tile if shape[1] == route.columns else tile[:, : route.columns]


def forward(rows: Rows, route: Route, wanted: OutputSpec = OutputSpec()) -> RowStats:  # noqa: B008
    """Compute the statistics of every row."""
    if not route.has_tile:
        rows = rows.local()
        hidden, head, column = rows.hidden, rows.head, local_target(rows)
        with matmul_precision(hidden.device, route.precision):
            given = (hidden, head, column, route.precision, wanted.extras)
            stats = route.backend.linear_stats(*given)
        return merge_vocab_shards(stats, rows)
    return chunked_loop(rows, route, row_chunks(rows.count, route), wanted)[0]


def chunked_loop(
    rows: Rows,
    route: Route,
    chunks: Sequence[slice],  # of the rows, in order, without gaps
    wanted: OutputSpec = OutputSpec(),  # noqa: B008
    stage: Stage | None = None,
    sums: TileGradients | None = None,
    reads_once: bool = False,
) -> tuple[RowStats, Gradients]:
    """Compute statistics of every row; with a ``stage`` also gradients, as ``sums`` has them.

    ``reads_once``: of ``logp`` alone, in :class:`GradientSums`, where the backend gives them.
    """
    hidden = rows.hidden
    rows = rows.local().ready()
    buffer = new_tile(route, max((part.stop - part.start for part in chunks), default=0))
    found: list[RowStats] = []
    with matmul_precision(hidden.device, route.precision):
        for part in chunks:
            chunk = rows.narrow(part)
            if reads_once:
                assert stage is not None and isinstance(sums, GradientSums)
                found.append(_run_chunk_of_one_read(chunk, part, buffer, route, stage, sums))
            else:
                found.append(_run_chunk(chunk, part, buffer, route, wanted, stage, sums))
        gradients = Gradients() if sums is None else sums.finish()
    return concatenate(found) if found else _no_stats(rows, wanted), gradients


def _run_chunk(
    chunk: Rows,
    part: slice,
    buffer: Tensor,
    route: Route,
    wanted: OutputSpec,
    stage: Stage | None,
    sums: TileGradients | None,
) -> RowStats:
    """Form a chunk's logits in ``buffer`` and their statistics; with a stage also gradients."""
    tile, stats = _tile(chunk, buffer, route, wanted.extras)
    stats, shard = merge_vocab_shards(stats, chunk), chunk.head.shard
    masked = None
    if chunk.sampling_mask is not None:
        masked = MaskedRows.of(tile, chunk.sampling_mask, shard)
        stats = stats._replace(masked_logp=masked.logp.to(stats.logp.dtype))
    if wanted.mean:
        stats = stats._replace(mean_logit=mean_logits(tile, shard))
    if wanted.top_k:
        stats = with_top_k(tile, stats, wanted.top_k, shard)
    if stage is not None and sums is not None:
        outer = stage(part, stats)
        sums.take(Chunk(chunk, part, tile, stats, masked), outer, route)
    return stats


def _run_chunk_of_one_read(
    chunk: Rows, part: slice, buffer: Tensor, route: Route, stage: Stage, sums: GradientSums
) -> RowStats:
    """Form a chunk's logits in ``buffer``, then statistics and gradients in one read of them."""
    logits = _project(chunk, buffer, route)[: chunk.count]
    tile = Tile(logits, chunk.target, chunk.head.transform)
    stats, gradient = route.backend.logp_gradient_(tile)
    outer = stage(part, stats)
    assert outer.dlogp is not None
    sums.add(route.backend.weighted_gradient(gradient, outer.dlogp), part, chunk)
    return stats


def _tile(chunk: Rows, buffer: Tensor, route: Route, extras: bool) -> tuple[Tile, RowStats]:
    """Form the raw logits (C, V) of a chunk in ``buffer``, and their statistics."""
    count, backend = chunk.count, route.backend
    transform, column = chunk.head.transform, local_target(chunk)
    if route.forms_logits:
        logits = buffer if len(buffer) == count else buffer[:count]
        given = (chunk.hidden, chunk.head, column, "fp32", extras)
        stats = backend.linear_stats(*given, logits)
        return Tile(logits, chunk.target, transform), stats
    tile = Tile(_project(chunk, buffer, route), column, transform)
    if route.fixed_rows is not None:
        tile = _filled_tile(tile, route.fixed_rows)
    stats = backend.stats(tile, extras).rows(slice(count))
    return Tile(tile.logits[:count], chunk.target, transform), stats


def _project(chunk: Rows, buffer: Tensor, route: Route) -> Tensor:
    """Form the raw logits of a chunk in ``buffer``, and of the zeros that fill it up.

    How a library multiplies a row depends on the number of rows, and on where they lie in memory.
    With ``fixed_rows`` both are always the same, and so are the row's bits.
    """
    hidden = chunk.hidden
    if route.fixed_rows is not None:
        hidden = _filled_up(hidden, route.fixed_rows)
        prove_same_bits(chunk.head, buffer[: route.fixed_rows], route.precision)
    return project(hidden, chunk.head, buffer[: hidden.shape[0]])


def _filled_tile(tile: Tile, rows: int) -> Tile:
    transform: Transform = tile.transform
    if isinstance(transform.temperature, Tensor):
        temperature = _filled_up(transform.temperature, rows, value=1)
        transform = replace(transform, temperature=temperature)
    return Tile(tile.logits, _filled_up(tile.target, rows), transform)


def _filled_up(x: Tensor, rows: int, value: int = 0) -> Tensor:
    filled = x.new_full((rows, *x.shape[1:]), value)
    filled[: x.shape[0]] = x
    return filled


def _no_stats(rows: Rows, wanted: OutputSpec) -> RowStats:
    wide = stats_dtype(rows.hidden.dtype)
    shapes = shapes_of(torch.Size((0,)), wanted, rows.sampling_mask is not None)
    return RowStats(
        **{name: rows.hidden.new_empty(s, dtype=dtype_of(name, wide)) for name, s in shapes.items()}
    )
