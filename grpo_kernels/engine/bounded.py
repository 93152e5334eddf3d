"""Tensors that a forward saves for its backward, and the sparsified backward.

The sparsified backward replaces the gradient of a row's logits by its large entries and an unbiased
sample of its small ones (gradient sparsification by magnitude: Wangni et al., arXiv:1710.09854).
A row that would need too many entries is computed exactly, from logits that are computed again.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends import (
    Entries,
    OutputSpec,
    RowStats,
    StatsGrad,
    TileGradient,
    concatenate,
)
from grpo_kernels.batch import host
from grpo_kernels.engine.chosen_entries import (
    REPORT,
    bounded_report,
    choose_entries,
    factors,
    pack_entries,
    unpack_entries,
    within_tolerance,
)
from grpo_kernels.engine.chunked_loop import Chunk, chunked_loop, row_chunks
from grpo_kernels.engine.gradients import (
    GradientSums,
    gradients_of_logp,
    new_gradients,
    recompute_backward,
)
from grpo_kernels.engine.logprobs_plan import (
    ENTRIES,
    HIDDEN,
    SavedForBackward,
    needs_of_gemms,
)
from grpo_kernels.engine.lora_gradients import LoRAGradients
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Gradients, Needs, Rows, selection_of
from grpo_kernels.engine.weight_sum import WeightGrad, WeightSum
from grpo_kernels.head import matmul_precision


def saving_forward(
    rows: Rows, route: Route, outputs: OutputSpec, plan: SavedForBackward
) -> tuple[RowStats, Tensor]:
    """Compute the statistics of every row, and the tensor that is saved for the backward."""
    chunks = row_chunks(rows.count, route)
    bounded = route.options.bounded
    if plan.kind == HIDDEN:
        sums = GradientSums(rows, Needs(hidden=True), len(chunks))
    else:
        # inside torch.compile the plan also counts rows without a target
        height = rows.count if plan.kind == ENTRIES else plan.shape[0]
        saved = torch.empty((height, plan.shape[1]), dtype=plan.dtype, device=route.device)

    def consume(chunk: Chunk) -> None:
        if plan.kind == HIDDEN:
            sums.add_chunk(chunk, _unit(chunk.stats), route)
        elif bounded is not None:
            pack_entries(choose_entries(chunk, None, bounded, route), saved[chunk.part])
        else:
            place = saved[chunk.part, : route.columns]
            route.backend.dlogits_(chunk.tile, chunk.stats, _unit(chunk.stats), place)

    with matmul_precision(route.device, route.precision):
        stats = chunked_loop(
            rows=rows,
            route=route,
            chunks=chunks,
            outputs=outputs,
            consume=consume,
            with_gradient=plan.with_gradient,
        )
        if plan.kind == HIDDEN:
            dhidden = sums.finish().hidden
            assert dhidden is not None
            saved = dhidden.to(plan.dtype)
    return stats, saved


def _unit(stats: RowStats) -> StatsGrad:
    """Return gradients of 1; 0 for rows without a softmax, where NaN would survive a factor 0."""
    return StatsGrad(stats.lse.isfinite().to(stats.logprobs.dtype))


def saved_gradients(
    kind: str,
    saved: Tensor,
    rows: Rows,
    stats: RowStats,
    grad_stats: StatsGrad,
    route: Route,
    needs: Needs,
    weight_grad: WeightGrad,
) -> Gradients:
    """Compute gradients from the tensor that :func:`saving_forward` saved for the same rows."""
    bounded = route.options.bounded
    if kind == ENTRIES and bounded is not None:
        factor = factors(grad_stats)
        entries = within_tolerance(unpack_entries(saved), factor, bounded)
        by_gemms = needs_of_gemms(needs, bounded)
        gradients = bounded_gradients(
            entries=entries,
            factor=factor,
            grad_stats=grad_stats,
            rows=rows,
            stats=stats,
            route=route,
            needs=needs.of_rows if by_gemms.any else needs,
            weight_grad=weight_grad,
        )
        if not by_gemms.any:
            return gradients
        of_head = recompute_backward(
            rows=rows,
            stats=stats,
            grad_stats=grad_stats,
            route=route.tiled(),
            needs=by_gemms,
            weight_grad=weight_grad,
            selection=rows.with_target(factor != 0),
        )
        return gradients.joined(of_head)
    dlogp = grad_stats.dlogp
    assert dlogp is not None
    nan = torch.full_like(dlogp, torch.nan)
    dlogp = torch.where(stats.lse.isfinite() | (dlogp == 0), dlogp, nan)
    if kind == HIDDEN:
        return Gradients(saved * dlogp[:, None] if needs.hidden else None)
    return gradients_of_logp(
        rows=rows,
        gradient=TileGradient(saved[: rows.count, : route.columns]),
        dlogp=dlogp,
        route=route,
        needs=needs,
        weight_grad=weight_grad,
    )


class BoundedSums:
    """Sums of gradients by entries, if the gradients of the rows' statistics are known."""

    def __init__(
        self,
        rows: Rows,
        needs: Needs,
        num_chunks: int,
        *,
        route: Route,
        weight_grad: WeightGrad,
    ) -> None:
        bounded = route.options.bounded
        assert bounded is not None
        self._rows = rows
        self._needs = needs
        self._weight_grad = weight_grad
        self._route = route
        self._bounded = bounded
        self._exact: GradientSums | None = None
        by_gemms = needs_of_gemms(needs, bounded)
        if by_gemms.any:
            self._needs = needs.of_rows
            self._exact = GradientSums(rows, by_gemms, num_chunks, weight_grad=weight_grad)
        self._entries: list[Entries] = []
        self._stats: list[RowStats] = []
        self._grad_stats: list[StatsGrad] = []
        # from :func:`bounded_report`, after ``finish``
        self.report = torch.zeros(len(REPORT), dtype=torch.float64, device=route.device)

    def add_chunk(self, chunk: Chunk, grad_stats: StatsGrad, route: Route) -> None:
        self._entries.append(choose_entries(chunk, grad_stats, self._bounded, route))
        self._stats.append(chunk.stats)
        self._grad_stats.append(grad_stats)
        if self._exact is not None:
            self._exact.add_chunk(chunk, grad_stats, route)

    def finish(self) -> Gradients:
        head = Gradients() if self._exact is None else self._exact.finish()
        if not self._entries:
            empty = GradientSums(self._rows, self._needs, 0, weight_grad=self._weight_grad)
            return empty.finish().joined(head)
        grad_stats = concatenate(self._grad_stats)
        factor = factors(grad_stats)
        entries = within_tolerance(concatenate(self._entries), factor, self._bounded)
        self.report = bounded_report(entries, factor, self._rows.head.shard)
        gradients = bounded_gradients(
            entries=entries,
            factor=factor,
            grad_stats=grad_stats,
            rows=self._rows,
            stats=concatenate(self._stats),
            route=self._route,
            needs=self._needs,
            weight_grad=self._weight_grad,
        )
        return gradients.joined(head)


def bounded_gradients(
    entries: Entries,
    factor: Tensor,  # (T,)
    grad_stats: StatsGrad,
    rows: Rows,
    stats: RowStats,
    route: Route,
    needs: Needs,
    weight_grad: WeightGrad,
) -> Gradients:
    """Compute gradients from the rows' entries, and from logits for whole rows."""
    entries = entries._replace(used=torch.where(factor == 0, 0, entries.used))
    whole = entries.used < 0
    listed = entries.used.clamp(min=0).sum()
    count, total = host.values(host.sync_to_host(torch.stack([whole.sum(), listed])))
    if count:
        gradients = recompute_backward(
            rows=rows,
            stats=stats,
            grad_stats=grad_stats,
            route=route.tiled(),
            needs=needs,
            weight_grad=replace(weight_grad, is_wide=True),
            selection=selection_of(whole, count),
        )
    else:
        gradients = new_gradients(rows, needs, 1)
        if needs.weight:
            of_weight = WeightSum(
                weight=rows.head.weight,
                dtype=rows.hidden.dtype,
                num_rows=rows.count,
                num_ranges=1,
                grad=weight_grad,
            )
            gradients = gradients._replace(weight=of_weight.result)
    with matmul_precision(route.device, route.precision):
        head = rows.ready().head
        dweight, dhidden = gradients.weight, gradients.hidden
        if needs.weight and weight_grad.main_grad is not None:
            dweight = weight_grad.main_grad
        if dhidden is not None and head.shard is not None:  # whole rows are already summed
            dhidden = torch.zeros_like(dhidden)

        def add(x: Tensor, matrix: Tensor, dx: Tensor | None, dmatrix: Tensor | None) -> None:
            if dx is not None:
                route.backend.entries_matmul(entries, factor, matrix, dx)
            if dmatrix is not None:
                route.backend.entries_transposed_matmul(
                    entries=entries,
                    factor=factor,
                    rows=x,
                    out=dmatrix,
                    add=count > 0 or dmatrix is not gradients.weight,
                    count=total,
                )

        add(rows.hidden, head.weight, dhidden, dweight)
        if dhidden is not None and gradients.hidden is not None and head.shard is not None:
            head.shard.start_sum(dhidden).wait()
            dhidden = torch.where(whole[:, None], gradients.hidden, dhidden)
            gradients = gradients._replace(hidden=dhidden)
        if gradients.bias is not None:
            add(factor.new_ones(len(factor), 1), head.weight, None, gradients.bias[:, None])
        if head.lora is not None:  # zero the other rows: a factor 0 would not remove a NaN
            sampled = (factor != 0) & ~whole  # on this or another rank
            hidden = torch.where(sampled[:, None], rows.hidden, 0)
            lora = LoRAGradients(head.lora, replace(rows, hidden=hidden), needs)
            inner = head.lora.project_down(hidden) if needs.lora_b else hidden
            add(inner, head.lora.b, lora.dinner, lora.db)
            gradients = lora.complete(gradients)
    return gradients
