"""What a forward keeps of its gradients, and the backward that takes it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends import OutputSpec, RowStats, StatsGrad, TileGradient
from grpo_kernels.engine.bounded import (
    bounded_gradients,
    chosen_entries,
    of_kept,
    to_keep,
    within,
)
from grpo_kernels.engine.chunked_loop import chunked_loop, row_chunks
from grpo_kernels.engine.gradients import Chunk, GradientSums, TileGradients
from grpo_kernels.engine.needs import Gradients, Needs
from grpo_kernels.engine.recompute import recompute_backward
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Rows
from grpo_kernels.engine.saved_for_backward import ENTRIES, HIDDEN, SavedForBackward
from grpo_kernels.head import matmul_precision


class KeptLogits(TileGradients):
    """Keeps them all, (T, V)."""

    def __init__(self, kept: Tensor) -> None:
        self._kept = kept

    def take(self, chunk: Chunk, outer: StatsGrad, route: Route) -> None:
        place = self._kept[chunk.rows.part]
        route.backend.dlogits_(chunk.tile, chunk.stats, outer, place.dtype, place)


class KeptEntries(TileGradients):
    """Keeps each row's entries and the error that it was allowed, as :func:`to_keep` has them."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def take(self, chunk: Chunk, outer: StatsGrad, route: Route) -> None:
        assert route.options.bounded is not None
        self.found.append(to_keep(*chosen_entries(chunk, None, route.options.bounded, route)))


def saving_forward(
    rows: Rows, route: Route, wanted: OutputSpec, saving: SavedForBackward
) -> tuple[RowStats, Tensor]:
    """Compute the statistics of every row, and what is kept for the backward."""
    chunks = row_chunks(rows.count, route)
    given = rows, route, chunks, wanted, _unit
    if saving.kind == HIDDEN:
        stats, gradients = chunked_loop(*given, GradientSums(rows, Needs(hidden=True), len(chunks)))
        assert gradients.hidden is not None
        return stats, gradients.hidden.to(saving.dtype)
    if saving.kind == ENTRIES:
        entries = KeptEntries()
        stats = chunked_loop(*given, entries)[0]
        none = rows.hidden.new_empty((0, saving.shape[1]), dtype=saving.dtype)
        return stats, torch.cat([none, *entries.found])
    kept = torch.empty(saving.shape, dtype=saving.dtype, device=route.device)
    return chunked_loop(*given, KeptLogits(kept[:, : route.columns]))[0], kept


def _unit(part: slice, stats: RowStats) -> StatsGrad:
    """Return gradients of 1: of rows with a softmax, since the others' would outlast a zero."""
    return StatsGrad(stats.lse.isfinite().to(stats.logp.dtype))


def saved_gradients(
    kind: str, kept: Tensor, rows: Rows, stats: RowStats, dlogp: Tensor, route: Route, needs: Needs
) -> Gradients:
    """Compute gradients from what :func:`saving_forward` kept of the same rows."""
    if kind == ENTRIES:
        return _gradients_of_entries(kept, rows, stats, dlogp, route, needs)
    nan = torch.full_like(dlogp, torch.nan)
    dlogp = torch.where(stats.lse.isfinite() | (dlogp == 0), dlogp, nan)
    if kind == HIDDEN:
        return Gradients(kept * dlogp[:, None] if needs.hidden else None)
    # a product with 0 would not hide what is no number
    rows = replace(rows, hidden=torch.where((dlogp == 0)[:, None], 0, rows.hidden))
    sums, everything = GradientSums(rows, needs, 1), slice(0, rows.count)
    with matmul_precision(route.device, route.precision):
        factor = sums.scaled(StatsGrad(dlogp)).dlogp
        gradient = TileGradient(kept[everything, : route.columns], factor)
        sums.add(gradient, rows.ready().narrow(everything))
        return sums.finish()


def _gradients_of_entries(
    kept: Tensor, rows: Rows, stats: RowStats, dlogp: Tensor, route: Route, needs: Needs
) -> Gradients:
    bounded = route.options.bounded
    assert bounded is not None
    entries = within(*of_kept(kept), dlogp, bounded)
    if not (bounded.exact_weight and needs.of_head):
        return bounded_gradients(entries, dlogp, rows, stats, route, needs)
    found = bounded_gradients(entries, dlogp, rows, stats, route, needs.of_rows)
    chosen = rows.valid(dlogp != 0)
    outer = StatsGrad(chosen.take(dlogp))
    part = RowStats(*(chosen.take(x) for x in stats[:3]))  # type: ignore[arg-type]
    of_head = recompute_backward(chosen, part, outer, route.tiled(), needs.of_head_alone)
    return found.joined(of_head)
