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
from grpo_kernels.engine.chunked_loop import forward
from grpo_kernels.engine.gradients import recompute_backward
from grpo_kernels.engine.logprobs_plan import NOTHING, LogprobsPlan
from grpo_kernels.engine.retry_on_oom import retry_on_oom
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Gradients, Rows
from grpo_kernels.head import check_plain, first_derivative_only

DIFFERENTIABLE = ("logprobs", "entropy", "masked_logprobs")
INPUTS = ("hidden", "weight", "bias", "lora.a", "lora.b")


def differentiable_stats(rows: Rows, plan: LogprobsPlan) -> tuple[RowStats, Tensor | None]:
    """Compute the statistics of rows that all have a target, and what is kept for the backward.

    Those that are :data:`DIFFERENTIABLE` have gradients for the hidden states and the head.
    """
    if not plan.route.backend.has_tiles:
        given = (rows.hidden, rows.head, rows.target, plan.precision, rows.sampling_mask)
        return reference_logprobs(*given, plan.wanted), None
    check_plain(**dict(zip(INPUTS, rows.inputs, strict=True)))
    if not plan.needs.any:
        return rows_forward(rows, plan)
    *stats, kept = _Stats.apply(rows, plan, *rows.inputs)
    return RowStats(*stats), kept


class _Stats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, plan: LogprobsPlan, *inputs: Tensor | None) -> Any:
        stats, kept = rows_forward(rows, plan)
        ctx.rows = rows.without_inputs()
        ctx.plan = replace(plan, head=ctx.rows.head)
        ctx.result_of = "linear_logprobs"
        # what belongs to the rows, too: autograd then refuses a backward after a change in place
        ctx.save_for_backward(*inputs, kept, *stats[:3], *rows.belongings)
        of_stats = (x for n, x in zip(stats._fields, stats, strict=True) if n not in DIFFERENTIABLE)
        ctx.mark_non_differentiable(*(x for x in (*of_stats, kept) if x is not None))
        ctx.set_materialize_grads(False)  # entropy without a gradient needs no logits
        return (*stats, kept)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: Any, *grad_stats: Tensor | None) -> Any:
        hidden, *of_head, kept, logp, entropy, lse = saved[: len(INPUTS) + 4]
        rows = ctx.rows.with_inputs(hidden, *of_head)
        plan = replace(ctx.plan, head=rows.head)
        given = RowStats(*grad_stats[:-1])  # type: ignore[arg-type]
        grad_stats = StatsGrad(
            *map(contiguous, (given.logprobs, given.entropy, given.masked_logprobs))
        )
        stats = RowStats(logp, entropy, lse)
        gradients = stats_backward(rows, stats, grad_stats, plan, kept)
        pairs = zip(gradients, (hidden, *of_head), strict=True)
        found = (None if g is None else g.to(x.dtype) for g, x in pairs)
        return None, None, *found


def contiguous(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient contiguous; None also for that of an output that is empty."""
    return None if gradient is None or not gradient.numel() else gradient.contiguous()


def rows_forward(rows: Rows, plan: LogprobsPlan) -> tuple[RowStats, Tensor | None]:
    """Compute the statistics of rows that all have a target, with as much memory as there is.

    Also return what is kept for the backward.
    """

    def run(route: Route) -> tuple[RowStats, Tensor | None]:
        if plan.saving.kind == NOTHING:
            return forward(rows, route, plan.wanted), None
        return saving_forward(rows, route, plan.wanted, plan.saving)

    with torch.no_grad():
        return retry_on_oom(run, plan.forward_route)


def stats_backward(
    rows: Rows, stats: RowStats, grad_stats: StatsGrad, plan: LogprobsPlan, kept: Tensor | None
) -> Gradients:
    """Compute gradients from what :func:`rows_forward` returned, in fp32 or the hidden states'
    dtype; ``grad_stats`` are those of the statistics."""
    kind, given = plan.saving.kind, grad_stats.dmasked if plan.masked else grad_stats.dlogp
    others = (
        grad_stats._replace(dlogp=None) if not plan.masked else grad_stats._replace(dmasked=None)
    )
    if kept is not None and given is not None and others.nonzero is None:
        return saved_gradients(
            kind=kind,
            kept=kept,
            rows=rows,
            stats=stats,
            grad_stats=grad_stats,
            route=plan.route,
            needs=plan.needs,
        )
    chosen, needs = rows.chosen(grad_stats.nonzero), plan.needs

    def run(route: Route) -> Gradients:
        return recompute_backward(chosen, stats, grad_stats, route, needs)

    return retry_on_oom(run, plan.route.tiled(), not_retryable=needs.main_grad is not None)
