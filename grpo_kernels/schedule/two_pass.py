"""Two passes: log-probabilities, the loss in torch, then the gradients of the head's inputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends import RowStats, StatsGrad
from grpo_kernels.engine import (
    ENTRIES,
    Gradients,
    MainGrad,
    Needs,
    Rows,
    bounded_report,
    differentiable_stats,
    of_kept,
    rows_forward,
    stats_backward,
)
from grpo_kernels.losses import static_weights, top_entropy_gate, weighted_loss
from grpo_kernels.schedule.loss_metrics import LossParts
from grpo_kernels.schedule.loss_plan import Plan


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
    rows = plan.rows(hidden)
    stats, kept = rows_forward(rows, plan)
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
    parts = LossParts(stage.loss(), logp, entropy, gate, _report(plan, kept))
    if not plan.needs.any:
        return parts, Gradients()
    if plan.scope == "batch" and active.index is not None:
        outer = outer.rows(active.index)
    if rows.sampling_mask is not None:
        outer = StatsGrad(None, outer.dentropy, outer.dlogp)
    return parts, stats_backward(rows, stats, outer, plan, kept)


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
    if active.forward_only is None or logp.numel() == plan.batch.num_tokens:
        return logp, entropy
    with torch.no_grad():
        others = _logprobs(plan.rows(hidden, active.forward_only), plan)
    return active.merge(logp, others[0]), active.merge(entropy, others[1])


def _logprobs(rows: Rows, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the policy's log-probabilities of the targets, its entropy, and the report of a
    bounded backward."""
    rows.check_values()
    if not torch.is_grad_enabled():
        plan = replace(plan, needs=Needs())
    elif plan.main_grad is not None:
        plan = replace(plan, needs=replace(plan.needs, main_grad=MainGrad(plan.main_grad)))
    stats, kept = differentiable_stats(rows, plan, name="linear_policy_loss")
    return _of_policy(stats), stats.entropy, _report(plan, kept)


def _report(plan: Plan, kept: Tensor | None) -> Tensor | None:
    if kept is None or plan.saving.kind != ENTRIES:
        return None
    return bounded_report(of_kept(kept)[0])
