"""Choosing, packing and reporting the entries of a sparsified backward.

The rows of a chunk share one cut between large and small entries, weighted by the gradients of the
log-probabilities if these are known. The cut is chosen for the error that the tolerance allows. A
row that would need too many entries is computed exactly. See ``bounded.py`` for the source.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends import WHOLE, Entries, StatsGrad, row_weights
from grpo_kernels.engine.chunked_loop import Chunk
from grpo_kernels.engine.options import Bounded
from grpo_kernels.engine.route import Route
from grpo_kernels.head import VocabShard

# share of the tolerance for the gradient of the logits; the rest covers the other gradients, and
# the sample from which a cut is chosen
_SHARE = 0.85
REPORT = ("entries", "whole", "rows", "error", "norm", "bound")


def choose_entries(
    chunk: Chunk, grad_stats: StatsGrad | None, bounded: Bounded, route: Route
) -> Entries:
    """Choose the entries of a chunk's rows.

    ``grad_stats`` are the gradients of the rows' statistics; None: unknown yet, treated as 1 for
    log-probabilities. With a gradient of the entropy, the entries sparsify the gradient of the
    loss, otherwise the gradient of the log-probabilities.
    """
    rows = chunk.rows
    tile = chunk.tile
    stats = chunk.stats
    gradient = chunk.gradient
    slots = min(bounded.slots, route.columns)
    shard = rows.head.shard
    if chunk.masked is not None:
        return _combined(chunk.masked.entries(slots, stats.logprobs.dtype), shard)
    cuts = route.backend.chosen_cuts(
        tile=tile,
        stats=stats,
        grad_stats=grad_stats,
        share=_SHARE * bounded.tolerance,
        gradient=gradient,
        total=None if shard is None else lambda x: shard.gather(x).sum(0),
    )
    entries = route.backend.extract_entries(
        tile=tile,
        stats=stats,
        seed=bounded.seed + (0 if shard is None else shard.rank),
        first=chunk.part.start,
        cuts=cuts,
        slots=slots,
        gradient=gradient,
        grad_stats=None if grad_stats is None or grad_stats.dentropy is None else grad_stats,
    )
    return _combined(entries, shard)


def _combined(entries: Entries, shard: VocabShard | None) -> Entries:
    """Return this rank's entries with errors and norms over all ranks.

    A row that is whole on one rank is whole on all ranks.
    """
    if shard is None:
        return entries
    squares = [x.double() ** 2 for x in (entries.error, entries.expected_error, entries.norm)]
    mine = [*squares, entries.error_l1.double(), (entries.used < 0).double()]
    *squares, error_l1, whole = shard.gather(torch.stack(mine)).sum(0)
    error, expected, norm = (x.sqrt() for x in squares)
    is_sparse = whole == 0
    dtype = entries.error.dtype
    return entries._replace(
        used=torch.where(is_sparse, entries.used, WHOLE),
        error=torch.where(is_sparse, error, 0.0).to(dtype),
        error_l1=torch.where(is_sparse, error_l1, 0.0).to(dtype),
        expected_error=torch.where(is_sparse, expected, 0.0).to(dtype),
        norm=norm.to(dtype),
    )


def pack_entries(entries: Entries, out: Tensor) -> None:
    """Write entries to (C, 2 K + 5) integers; floats keep their bits."""
    slots = entries.ids.shape[1]
    dtype = out.dtype
    out[:, :slots] = entries.values.view(dtype)
    for place, each in enumerate(entries[3:], slots):
        out[:, place] = each.view(dtype)
    out[:, slots + 4 : -1] = entries.ids
    out[:, -1] = entries.used


def unpack_entries(packed: Tensor) -> Entries:
    """Return the entries written by :func:`pack_entries`."""
    slots = packed.shape[1] // 2 - 2
    floats, integers = packed.split((slots + 4, slots + 1), 1)
    floats = floats.view(torch.float64 if packed.dtype == torch.int64 else torch.float32)
    return Entries(
        integers[:, :slots].int(),
        floats[:, :slots].contiguous(),
        integers[:, slots].int(),
        *floats[:, slots:].unbind(1),
    )


def within_tolerance(entries: Entries, dlogp: Tensor, bounded: Bounded) -> Entries:
    """Make rows whole until these gradients are within the tolerance.

    The cut was chosen before the gradients were known, or from a sample. Expected errors decide,
    not actual ones, so the sparse rows stay unbiased.
    """
    share = (dlogp * entries.expected_error).double() ** 2
    share = torch.where(share.isfinite(), share, 0.0)
    most = bounded.tolerance**2 * ((dlogp * entries.norm).double() ** 2).sum()
    order = share.argsort(descending=True)
    sums = share[order].cumsum(0)
    excess = sums[-1:] - sums + share[order] > most  # the error left after the previous rows
    whole = torch.zeros_like(excess).index_copy_(0, order, excess)
    return entries._replace(used=torch.where(whole, WHOLE, entries.used))


def saved_entries(chunk: Chunk, grad_stats: StatsGrad, route: Route) -> Entries:
    """Choose the entries of all rows, in one chunk, for gradients of their log-probabilities."""
    bounded = route.options.bounded
    assert bounded is not None and grad_stats.dlogp is not None
    entries = choose_entries(chunk, grad_stats, bounded, route)
    return within_tolerance(entries, grad_stats.dlogp, bounded)


def factors(grad_stats: StatsGrad) -> Tensor:
    """Return the factors of the rows' entries, (C,)."""
    if grad_stats.dentropy is not None:
        return row_weights(grad_stats).to(grad_stats.dentropy.dtype)
    factor = grad_stats.dlogp if grad_stats.dmasked is None else grad_stats.dmasked
    assert factor is not None
    return factor


def bounded_report(
    entries: Entries, factor: Tensor | None = None, shard: VocabShard | None = None
) -> Tensor:
    """Return the (6,) fp64 sums named by :data:`REPORT`, for a sparse backward."""
    weight = torch.ones_like(entries.norm) if factor is None else factor.abs()
    sparse = entries.used >= 0
    squares = [((weight * x).double() ** 2).sum() for x in (entries.error * sparse, entries.norm)]
    bound = (weight * entries.error_l1 * sparse).double().sum()
    listed = entries.used.clamp(min=0).sum().double()
    if shard is not None:
        listed = shard.gather(listed).sum()
    counts = listed, (~sparse).sum(), weight.count_nonzero()
    return torch.stack([*(x.double() for x in counts), *squares, bound])
