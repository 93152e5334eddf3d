"""What a forward keeps for its backward, and the bounded backward from the entries that matter.

The rows of a chunk share one cut of their sizes, weighted by the gradients of log-probabilities
where these are known already. It is chosen for the error that the tolerance allows of the chunk. A
row that would need too many entries is computed exactly, from logits that are formed again.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends import (
    ANY_ERROR,
    WHOLE,
    Entries,
    OutputSpec,
    RowStats,
    StatsGrad,
    TileGradient,
    best_cut,
    concatenate,
    row_keys,
    sampled_blocks,
)
from grpo_kernels.batch import host
from grpo_kernels.engine.chunked_loop import Chunk, chunked_loop, row_chunks
from grpo_kernels.engine.gradients import (
    GradientSums,
    LoRAGradients,
    gradients_of_logp,
    new_gradients,
    recompute_backward,
)
from grpo_kernels.engine.logprobs_plan import (
    ENTRIES,
    HIDDEN,
    SavedForBackward,
    kept_dtype,
    needs_of_gemms,
)
from grpo_kernels.engine.masked_rows import scores_at
from grpo_kernels.engine.options import Bounded
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Gradients, Needs, Rows
from grpo_kernels.head import matmul_precision

# of the tolerance: what is left is for other gradients than that of the logits, and for the sample
# from which a cut is chosen
_SHARE = 0.85
_NUM_CUTS = 12  # that are tried
_TINY = 1e-30
REPORT = ("entries", "whole", "rows", "error", "norm", "bound")


def saving_forward(
    rows: Rows, route: Route, wanted: OutputSpec, saving: SavedForBackward
) -> tuple[RowStats, Tensor]:
    """Compute the statistics of every row, and what is kept for the backward."""
    chunks, bounded = row_chunks(rows.count, route), route.options.bounded
    given = rows, route, chunks, wanted
    with matmul_precision(route.device, route.precision):
        if saving.kind == HIDDEN:
            sums = GradientSums(rows, Needs(hidden=True), len(chunks))
            stats = chunked_loop(*given, lambda chunk: sums.take(chunk, _unit(chunk.stats), route))
            dhidden = sums.finish().hidden
            assert dhidden is not None
            return stats, dhidden.to(saving.dtype)
        if bounded is not None:
            found = [rows.hidden.new_empty((0, saving.shape[1]), dtype=saving.dtype)]

            def keep(chunk: Chunk) -> None:
                found.append(to_keep(chosen_entries(chunk, None, bounded, route)))

            stats = chunked_loop(*given, keep, saving.with_gradient)
            return stats, torch.cat(found)
        kept = torch.empty(saving.shape, dtype=saving.dtype, device=route.device)

        def keep_all(chunk: Chunk) -> None:
            place = kept[chunk.rows.part, : route.columns]
            route.backend.dlogits_(chunk.tile, chunk.stats, _unit(chunk.stats), place)

        return chunked_loop(*given, keep_all), kept


def _unit(stats: RowStats) -> StatsGrad:
    """Return gradients of 1: of rows with a softmax, since the others' would outlast a zero."""
    return StatsGrad(stats.lse.isfinite().to(stats.logp.dtype))


def saved_gradients(
    kind: str, kept: Tensor, rows: Rows, stats: RowStats, dlogp: Tensor, route: Route, needs: Needs
) -> Gradients:
    """Compute gradients from what :func:`saving_forward` kept of the same rows."""
    bounded = route.options.bounded
    if kind == ENTRIES and bounded is not None:
        entries = within(of_kept(kept), dlogp, bounded)
        if not (bounded.exact_weight and needs.of_head):
            return bounded_gradients(entries, dlogp, rows, stats, route, needs)
        found = bounded_gradients(entries, dlogp, rows, stats, route, needs.of_rows)
        given = rows.valid(dlogp != 0), stats, StatsGrad(dlogp), route.tiled()
        return found.joined(recompute_backward(*given, needs.of_head_alone))
    nan = torch.full_like(dlogp, torch.nan)
    dlogp = torch.where(stats.lse.isfinite() | (dlogp == 0), dlogp, nan)
    if kind == HIDDEN:
        return Gradients(kept * dlogp[:, None] if needs.hidden else None)
    return gradients_of_logp(rows, TileGradient(kept[:, : route.columns]), dlogp, route, needs)


def chosen_entries(chunk: Chunk, dlogp: Tensor | None, bounded: Bounded, route: Route) -> Entries:
    """Choose the entries of a chunk's rows.

    ``dlogp`` (C,) is the gradient of the log-probabilities; None: not known yet, as if all were 1.
    """
    rows, tile, stats, gradient = chunk.rows, chunk.tile, chunk.stats, chunk.gradient
    norm = torch.where(stats.lse.isfinite(), _sizes_at_target(chunk), 0.0)
    weight = torch.ones_like(norm) if dlogp is None else dlogp.double().abs()
    # relative to the root mean square, so that the squares of sizes are in the range of fp32
    weight = weight / (weight * norm).square().mean().sqrt().clamp(min=_TINY)
    allowed = (_SHARE * bounded.tolerance) ** 2 * rows.count
    mass = (weight * norm).sum()
    least = (allowed / mass.clamp(min=_TINY)).clamp(max=1)
    cuts = least ** torch.linspace(1, 0, _NUM_CUTS, dtype=mass.dtype, device=mass.device)
    backend, dtype = route.backend, stats.logp.dtype
    sums = backend.tail_sums(
        tile=tile,
        stats=stats,
        weight=weight.to(dtype),
        cuts=cuts.to(dtype),
        gradient=gradient,
    )
    blocks, sampled = sampled_blocks(rows.count, route.columns)
    sums = sums.sum(0, dtype=torch.float64) * (blocks / sampled)
    cut = best_cut(sums, cuts, mass.new_tensor(allowed))
    each = torch.where(weight > 0, cut / weight.clamp(min=_TINY), ANY_ERROR)
    return backend.extract_entries(
        tile=tile,
        stats=stats,
        keys=row_keys(bounded.seed, stats.lse, rows.start),
        cuts=each.to(dtype),
        slots=min(bounded.slots, route.columns),
        gradient=gradient,
    )


def _sizes_at_target(chunk: Chunk) -> Tensor:
    """Return the gradients of log-probabilities by the targets' logits, (C,) fp64.

    They are the largest of their rows' entries, and at least as large as all others together.
    """
    rows = torch.arange(chunk.rows.count, device=chunk.logits.device)
    if chunk.gradient is not None:
        dlogits, scale = chunk.gradient
        assert scale is not None
        return dlogits[rows, chunk.rows.target].double() * scale
    slope = scores_at(chunk.tile, rows, chunk.rows.target)[1]
    return -torch.expm1(chunk.stats.logp.double()) * slope


def to_keep(entries: Entries) -> Tensor:
    """Return entries as one (C, 2 K + 5) tensor of integers."""
    floats = torch.cat([entries.values, torch.stack(entries[3:], 1)], 1)
    integers = torch.cat([entries.ids, entries.used[:, None]], 1)
    dtype = kept_dtype(floats.dtype)
    return torch.cat([floats.view(dtype), integers.to(dtype)], 1)


def of_kept(kept: Tensor) -> Entries:
    """Return what :func:`to_keep` was given."""
    slots = kept.shape[1] // 2 - 2
    floats, integers = kept.split((slots + 4, slots + 1), 1)
    floats = floats.view(torch.float64 if kept.dtype == torch.int64 else torch.float32)
    values, ids = floats[:, :slots].contiguous(), integers[:, :slots].int()
    return Entries(ids, values, integers[:, slots].int(), *floats[:, slots:].unbind(1))


def within(entries: Entries, dlogp: Tensor, bounded: Bounded) -> Entries:
    """Return the entries with as many rows whole as the tolerance needs for these gradients.

    A cut is chosen before the gradients are known, or from a sample. Expected errors decide, so
    that what is kept is right in the mean.
    """
    share = (dlogp * entries.expected_error).double() ** 2
    share = torch.where(share.isfinite(), share, 0.0)
    most = bounded.tolerance**2 * ((dlogp * entries.norm).double() ** 2).sum()
    order = share.argsort(descending=True)
    sums = share[order].cumsum(0)
    excess = sums[-1:] - sums + share[order] > most  # what is left without the rows before
    whole = torch.zeros_like(excess).index_copy_(0, order, excess)
    return entries._replace(used=torch.where(whole, WHOLE, entries.used))


def kept_entries(chunk: Chunk, dlogp: Tensor, route: Route) -> Entries:
    """Choose the entries of all rows, in a chunk, for gradients of their log-probabilities."""
    bounded = route.options.bounded
    assert bounded is not None
    return within(chosen_entries(chunk, dlogp, bounded, route), dlogp, bounded)


class BoundedSums:
    """Gradients by entries, where those of the rows' log-probabilities are known."""

    def __init__(self, rows: Rows, needs: Needs, num_chunks: int, route: Route) -> None:
        bounded = route.options.bounded
        assert bounded is not None
        self._rows, self._needs, self._route, self._bounded = rows, needs, route, bounded
        self._exact, by_gemms = None, needs_of_gemms(needs, bounded)
        if by_gemms.any:
            self._needs = needs.of_rows
            self._exact = GradientSums(rows, by_gemms, num_chunks)
        self._found: list[tuple[Entries, RowStats, Tensor]] = []
        # of :func:`bounded_report`, after ``finish``
        self.report = torch.zeros(len(REPORT), dtype=torch.float64, device=route.device)

    def take(self, chunk: Chunk, outer: StatsGrad, route: Route) -> None:
        assert outer.dlogp is not None and outer.dentropy is None
        entries = chosen_entries(chunk, outer.dlogp, self._bounded, route)
        self._found.append((entries, chunk.stats, outer.dlogp))
        if self._exact is not None:
            self._exact.take(chunk, outer, route)

    def finish(self) -> Gradients:
        head = Gradients() if self._exact is None else self._exact.finish()
        if not self._found:
            return GradientSums(self._rows, self._needs, 0).finish().joined(head)
        parts, stats, dlogp = zip(*self._found, strict=True)
        factor = torch.cat(dlogp)
        entries = within(concatenate(parts), factor, self._bounded)
        self.report = bounded_report(entries, factor)
        given = entries, factor, self._rows, concatenate(list(stats)), self._route, self._needs
        return bounded_gradients(*given).joined(head)


def bounded_gradients(
    entries: Entries, dlogp: Tensor, rows: Rows, stats: RowStats, route: Route, needs: Needs
) -> Gradients:
    """Compute gradients from the rows' entries; of rows that are whole from their logits."""
    entries = entries._replace(used=torch.where(dlogp == 0, 0, entries.used))
    whole = entries.used < 0
    listed = torch.where(dlogp == 0, 0, entries.used.clamp(min=0)).sum()
    count, total = host.values(host.sync_to_host(torch.stack([whole.sum(), listed])))
    if not count:
        found, _ = new_gradients(rows, needs, 1)
    else:
        chosen = rows.at(torch.argsort(~whole, stable=True)[:count])
        given = chosen, stats, StatsGrad(dlogp), route.tiled()
        found = recompute_backward(*given, replace(needs, wide=True))
    with matmul_precision(route.device, route.precision):
        head, dweight = rows.ready().head, found.weight
        if needs.weight and needs.main_grad is not None:
            dweight = needs.main_grad

        def add(x: Tensor, matrix: Tensor, dx: Tensor | None, dmatrix: Tensor | None) -> None:
            if dx is not None:
                route.backend.entries_matmul(entries, dlogp, matrix, dx)
            if dmatrix is not None:
                to_sum = count > 0 or dmatrix is not found.weight
                route.backend.entries_transposed_matmul(
                    entries=entries,
                    factor=dlogp,
                    rows=x,
                    out=dmatrix,
                    add=to_sum,
                    count=total,
                )

        add(rows.hidden, head.weight, found.hidden, dweight)
        if found.bias is not None:
            add(dlogp.new_ones(len(dlogp), 1), head.weight, None, found.bias[:, None])
        if head.lora is not None:  # a product with 0 would not hide what is no number
            hidden = torch.where(entries.used[:, None] > 0, rows.hidden, 0)
            lora = LoRAGradients(replace(rows, hidden=hidden), needs)
            inner = head.lora.inner(hidden) if needs.lora_b else hidden
            add(inner, head.lora.b, lora.dinner, lora.db)
            found = lora.complete(found)
    return found


def bounded_report(entries: Entries, dlogp: Tensor | None = None) -> Tensor:
    """Return what there is to know of a bounded backward, () sums of :data:`REPORT`, in fp64."""
    weight = torch.ones_like(entries.norm) if dlogp is None else dlogp.abs()
    kept = entries.used >= 0
    squares = [((weight * x).double() ** 2).sum() for x in (entries.error * kept, entries.norm)]
    bound = (weight * entries.error_l1 * kept).double().sum()
    counts = entries.used.clamp(min=0).sum(), (~kept).sum(), weight.count_nonzero()
    return torch.stack([*(x.double() for x in counts), *squares, bound])
