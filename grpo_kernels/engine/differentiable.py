"""Statistics of a head's rows that autograd can differentiate, with as much memory as there is.

A forward keeps what its plan says; the backward takes that, or forms the logits again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import RowStats, StatsGrad, reference_logprobs
from grpo_kernels.engine.bounded import saved_gradients, saving_forward
from grpo_kernels.engine.chunked_loop import chunked_loop, forward, row_chunks
from grpo_kernels.engine.gradients import Gradients, GradientSums, Needs
from grpo_kernels.engine.logprobs_plan import LogprobsPlan
from grpo_kernels.engine.recompute import recompute_backward
from grpo_kernels.engine.retry_on_oom import retry_on_oom
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Rows
from grpo_kernels.engine.saved_for_backward import NOTHING
from grpo_kernels.head import check_plain, first_derivative_only

DIFFERENTIABLE = ("logp", "entropy", "masked_logp")
INPUTS = ("hidden", "weight", "bias", "lora.a", "lora.b")


def differentiable_stats(
    rows: Rows,  # all with a target
    plan: LogprobsPlan,
    name: str = "linear_logprobs",  # whose results they are, for an error
) -> tuple[RowStats, Tensor | None]:
    """Compute the statistics of every row, and what is kept for the backward.

    Log-probabilities and entropy have gradients with respect to the hidden states and the head.
    """
    if not plan.route.backend.has_tiles:
        given = (rows.hidden, rows.head, rows.target, plan.precision, rows.sampling_mask)
        return reference_logprobs(*given, plan.wanted), None
    check_plain(**dict(zip(INPUTS, rows.inputs, strict=True)))
    if not plan.needs.any:
        return rows_forward(rows, plan)
    *stats, kept = _Stats.apply(rows, plan, name, *rows.inputs)
    return RowStats(*stats), kept


class _Stats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Rows, plan: LogprobsPlan, name: str, *inputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        stats, kept = rows_forward(rows, plan)
        # autograd keeps the tensors; without them the rows are what else belongs to them
        ctx.rows, ctx.plan, ctx.result_of = replace(rows, hidden=rows.hidden[:0]), plan, name
        # what belongs to the rows, too: autograd then refuses a backward after a change in place
        ctx.save_for_backward(*inputs, kept, *stats[:3], *rows.belongings)
        of_stats = (x for n, x in zip(stats._fields, stats, strict=True) if n not in DIFFERENTIABLE)
        ctx.mark_non_differentiable(*(x for x in (*of_stats, kept) if x is not None))
        ctx.set_materialize_grads(False)  # entropy without a gradient needs no logits
        return (*stats, kept)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: Any, *outer: Tensor | None) -> Any:
        hidden, *of_head, kept, logp, entropy, lse = saved[: len(INPUTS) + 4]
        rows = replace(ctx.rows, hidden=hidden, head=ctx.rows.head.with_tensors(*of_head))
        given = RowStats(*outer[:-1])  # type: ignore[arg-type]
        grad_stats = StatsGrad(*map(_dense, (given.logp, given.entropy, given.masked_logp)))
        stats = RowStats(logp, entropy, lse)
        gradients = stats_backward(rows, stats, grad_stats, ctx.plan, kept)
        pairs = zip(gradients, (hidden, *of_head), strict=True)
        found = (None if g is None else g.to(x.dtype) for g, x in pairs)
        return *[None] * 3, *found


def _dense(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous()


def stats_backward(
    rows: Rows,
    stats: RowStats,
    outer: StatsGrad,
    plan: LogprobsPlan,
    kept: Tensor | None,
) -> Gradients:
    """Compute gradients from the rows' statistics, the gradients of these and what was kept."""
    only_logp = outer.dlogp is not None and outer.dentropy is None and outer.dmasked is None
    if kept is not None and outer.dlogp is not None and only_logp:
        given = (plan.saving.kind, kept, rows, stats, outer.dlogp)
        return saved_gradients(*given, plan.route, plan.needs)
    chosen = rows.chosen(outer.nonzero)
    outer = StatsGrad(*(chosen.take(gradient) for gradient in outer))
    stats = RowStats(*(chosen.take(x) for x in stats[:3]))  # type: ignore[arg-type]
    gradients = rows_backward(chosen, stats, outer, plan.route, plan.needs)
    if gradients.hidden is None:
        return gradients
    return gradients._replace(hidden=chosen.scatter(gradients.hidden))


def rows_forward(rows: Rows, plan: LogprobsPlan) -> tuple[RowStats, Tensor | None]:
    """Compute the statistics of rows that all have a target, with as much memory as there is.

    Also return what is kept for the backward.
    """

    def run(route: Route) -> tuple[RowStats, Tensor | None]:
        if plan.saving.kind == NOTHING:
            return forward(rows, route, plan.wanted), None
        return saving_forward(rows, route, plan.wanted, plan.saving)

    with torch.no_grad():
        return retry_on_oom(run, plan.route)


def rows_backward(
    rows: Rows, stats: RowStats, outer: StatsGrad, route: Route, needs: Needs
) -> Gradients:
    """Compute gradients from what :func:`rows_forward` found, in fp32 or the hidden states' dtype.

    All of these rows have a gradient.
    """

    def run(route: Route) -> Gradients:
        if rows.sampling_mask is None:
            return recompute_backward(rows, stats, outer, route, needs)
        # its gradient needs the logits of all ids of a row's mask at once
        chunks = row_chunks(rows.count, route)
        stage = lambda part, stats: outer.rows(part)  # noqa: E731
        sums = GradientSums(rows, needs, len(chunks))
        return chunked_loop(rows, route, chunks, stage=stage, sums=sums)[1]

    return retry_on_oom(run, route.tiled(), not_retryable=needs.main_grad is not None)
