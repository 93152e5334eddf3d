"""Two passes: log-probabilities, the loss in torch, then the gradients of the head's inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import RowStats, StatsGradients, reference_logprobs
from grpo_kernels.engine import (
    ENTRIES,
    Gradients,
    Keeping,
    Rows,
    bounded_report,
    kept_gradients,
    of_kept,
    rows_backward,
    rows_forward,
)
from grpo_kernels.head import check_plain, first_derivative_only
from grpo_kernels.losses import static_weights, top_entropy_gate, weighted_loss
from grpo_kernels.schedule.parts import LossParts
from grpo_kernels.schedule.plan import Plan


def two_pass(hidden: Tensor, plan: Plan) -> LossParts:
    """Compute the loss of (T, D) hidden states; four GEMMs, backward included."""
    batch, weights, gate = plan.active.batch, static_weights(plan.batch, plan.config), None
    logp, entropy, report = _logprobs(plan.rows(hidden), plan)
    if plan.scope == "batch":  # the gate needs the entropy of all rows
        batch = plan.batch
        logp, entropy = with_rest(logp, entropy, hidden, plan)
        gate = _entropy_gate(entropy, plan)
    else:
        weights = plan.active.take_weights(weights)
    loss, gate = weighted_loss(logp, batch, plan.config, entropy, weights, gate)
    return LossParts(loss, logp.detach(), entropy.detach(), gate, report)


def two_pass_gradients(hidden: Tensor, plan: Plan) -> tuple[LossParts, Gradients]:
    """Compute the same loss with its gradients, without autograd.

    The gradient of the hidden states is that of the rows with one.
    """
    config, active = plan.config, plan.active
    rows, keeping = plan.rows(hidden), plan.keeping
    stats, kept = rows_forward(rows, plan.route, keeping=keeping)
    logp, entropy = _of_policy(stats), stats.entropy
    batch, weights, gate = active.batch, static_weights(plan.batch, config), None
    if plan.scope == "batch":
        batch = plan.batch
        logp, entropy = with_rest(logp, entropy, hidden, plan)
        gate = _entropy_gate(entropy, plan)
    else:
        weights = active.take_weights(weights)
    stage = plan.stage(batch, weights, config, logp.dtype, gate)
    outer = stage(slice(0, logp.numel()), RowStats(logp, entropy, entropy))
    parts = LossParts(stage.loss(), logp, entropy, gate, _report(keeping, kept))
    if not plan.needs.any:
        return parts, Gradients()
    if plan.scope == "batch" and active.index is not None:
        outer = outer.rows(active.index)
    return parts, _gradients(rows, stats, outer, plan, keeping, kept)


def _entropy_gate(entropy: Tensor, plan: Plan) -> Tensor:
    shard = plan.head.shard
    copies = 1 if shard is None else shard.size
    return top_entropy_gate(entropy, plan.config.top_entropy_quantile, copies)


def _of_policy(stats: RowStats) -> Tensor:
    """Return the policy's log-probabilities: renormalised where there is a sampling mask."""
    return stats.logp if stats.masked_logp is None else stats.masked_logp


def with_rest(
    logp: Tensor, entropy: Tensor, hidden: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:  # (T,)
    """Complete what is known of the rows with a gradient, by a forward of the others."""
    active = plan.active
    if active.rest is None or logp.numel() == plan.batch.num_tokens:
        return logp, entropy
    with torch.no_grad():
        others = _logprobs(plan.rows(hidden, active.rest), plan)
    return active.merge(logp, others[0]), active.merge(entropy, others[1])


def _logprobs(rows: Rows, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the policy's log-probabilities of the targets, its entropy, and the report of a
    bounded backward."""
    head = rows.head
    if not plan.route.backend.has_tiles:
        rows.check_values()
        precision, mask = plan.options.precision, rows.sampling_mask
        stats = reference_logprobs(rows.hidden, head, rows.target, precision, mask)
        return _of_policy(stats), stats.entropy, None
    names = ("hidden", "weight", "bias", "lora.a", "lora.b")
    check_plain(**dict(zip(names, (rows.hidden, *head.tensors), strict=True)))
    keeping = plan.keeping if torch.is_grad_enabled() else Keeping()
    return _Logprobs.apply(plan, rows, keeping, rows.hidden, *head.tensors)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, rows: Rows, keeping: Keeping, hidden: Tensor, *head: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        rows.check_values()
        stats, kept = rows_forward(rows, plan.route, keeping=keeping)
        # autograd keeps the tensors; without them the rows are what else belongs to them
        ctx.plan, ctx.rows, ctx.keeping = plan, replace(rows, hidden=hidden[:0]), keeping
        ctx.save_for_backward(hidden, *head, rows.target, kept, *stats[:3])
        ctx.set_materialize_grads(False)  # entropy without a gradient needs no logits
        report = _report(keeping, kept)
        if report is not None:
            ctx.mark_non_differentiable(report)
        return _of_policy(stats), stats.entropy, report

    @staticmethod
    @first_derivative_only("linear_policy_loss")
    def backward(ctx: Any, saved: Any, dlogp: Tensor, dentropy: Tensor, *_: None) -> Any:
        hidden, weight, bias, lora_a, lora_b, target, kept, *found = saved
        head = ctx.rows.head.with_tensors(weight, bias, lora_a, lora_b)
        rows = replace(ctx.rows, hidden=hidden, head=head, target=target)
        outer = StatsGradients(dlogp, dentropy)
        gradients = _gradients(rows, RowStats(*found), outer, ctx.plan, ctx.keeping, kept)
        inputs = (hidden, weight, bias, lora_a, lora_b)
        pairs = zip(gradients, inputs, strict=True)
        return None, None, None, *(None if g is None else g.to(x.dtype) for g, x in pairs)


def _report(keeping: Keeping, kept: Tensor | None) -> Tensor | None:
    if kept is None or keeping.what != ENTRIES:
        return None
    return bounded_report(of_kept(kept)[0])


def _gradients(
    rows: Rows,
    stats: RowStats,
    outer: StatsGradients,
    plan: Plan,
    keeping: Keeping,
    kept: Tensor | None,  # what the forward kept
) -> Gradients:
    """Compute gradients from the rows' statistics and the gradients of these."""
    needs, route = plan.needs, plan.route
    if plan.main_grad is not None:  # the gradients of the logits contain the loss's own
        needs = replace(needs, main_grad=plan.main_grad.direct())
    if kept is not None and outer.dlogp is not None and outer.dentropy is None:
        return kept_gradients(keeping.what, kept, rows, stats, outer.dlogp, route, needs)
    if rows.sampling_mask is not None:
        outer = StatsGradients(None, outer.dentropy, outer.dlogp)
    chosen = rows.chosen(outer.nonzero)
    outer = StatsGradients(*(chosen.take(gradient) for gradient in outer))
    stats = RowStats(*(chosen.take(x) for x in stats[:3]))  # type: ignore[arg-type]
    gradients = rows_backward(chosen, stats, outer, route, needs)
    if gradients.hidden is None:
        return gradients
    return gradients._replace(hidden=chosen.spread(gradients.hidden))
