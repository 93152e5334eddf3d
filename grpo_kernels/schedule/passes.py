"""The two schedules of a loss, without autograd: one pass over the head, or two.

One pass computes gradients in the forward, while each chunk's logits are there, or in the backward
from exponentials that the forward kept of all: three GEMMs. Two passes form the logits again for
the backward, four GEMMs, unless something was kept of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends import RowStats, StatsGrad, TileGradient
from grpo_kernels.batch import TokenBatch
from grpo_kernels.engine import (
    ENTRIES,
    BoundedSums,
    Chunk,
    Gradients,
    GradientSums,
    Needs,
    Rows,
    bounded_gradients,
    bounded_report,
    chunked_loop,
    differentiable_stats,
    gradients_of_logp,
    kept_entries,
    of_kept,
    rows_forward,
    stats_backward,
    to_keep,
)
from grpo_kernels.head import matmul_precision, stats_dtype
from grpo_kernels.losses import Weights, static_weights, top_entropy_gate, weighted_loss
from grpo_kernels.schedule.loss_plan import Plan
from grpo_kernels.schedule.loss_stage import policy_logp


class LossParts(NamedTuple):
    """A loss, and the statistics behind it."""

    loss: Tensor  # ()
    logp: Tensor  # (K,) of the rows with a gradient, or (T,) of all, as the next
    entropy: Tensor
    entropy_gate: Tensor | None = None  # (T,)
    bounded: Tensor | None = None  # (6,) REPORT, of a bounded backward


# the loss; its gradients if the forward computes them, that of hidden states for the rows with one;
# and what is saved for :func:`loss_backward`
Forward = tuple[LossParts, Gradients | None, tuple[Tensor | None, ...]]


def loss_forward(rows: Rows, plan: Plan) -> Forward:
    """Compute the loss of a batch's T rows, and start on its gradients, as planned."""
    if not plan.needs.any:
        return eager_loss(rows, plan), Gradients(), ()
    if plan.keeps:
        return _keeping(rows, plan)
    return (_one_pass if plan.schedule == "one_pass" else _two_pass)(rows, plan)


def _one_pass(rows: Rows, plan: Plan) -> Forward:
    """Compute logits, statistics, loss and gradients, chunk by chunk."""
    active, batch = plan.active, plan.active.batch
    rows, dtype = with_gradient(rows, plan), stats_dtype(rows.hidden.dtype)
    weights = active.take_weights(static_weights(plan.batch, plan.config, dtype))
    stage = plan.stage(batch, weights, plan.config, dtype)
    needs, chunks, route = plan.needs, plan.chunks, plan.route
    if needs.main_grad is not None:  # to which it is added in the backward
        needs = replace(needs, main_grad=None, wide=True)
    sums: GradientSums | BoundedSums
    if plan.options.bounded is None:
        sums = GradientSums(rows, needs, len(chunks))
    else:
        sums = BoundedSums(rows, needs, len(chunks), route)

    def take(chunk: Chunk) -> None:
        sums.take(chunk, stage(chunk.rows.part, chunk.stats), route)

    with matmul_precision(route.device, route.precision):
        stats = chunked_loop(rows, route, chunks, take=take, with_gradient=plan.with_gradient)
        gradients = sums.finish()
    report = sums.report if isinstance(sums, BoundedSums) else None
    parts = LossParts(stage.loss(), policy_logp(stats), stats.entropy, None, report)
    return parts, gradients, ()


def _keeping(rows: Rows, plan: Plan) -> Forward:
    """Compute the loss, and keep the gradients of log-probabilities by the logits."""
    chosen, kept = with_gradient(rows, plan), list[Chunk]()
    with matmul_precision(plan.route.device, plan.route.precision):
        stats = chunked_loop(
            chosen, plan.route, plan.chunks, take=kept.append, with_gradient=plan.with_gradient
        )
    parts, grad_stats = _scored_loss(stats, rows, plan)
    gradient = kept[0].gradient
    dlogp = grad_stats.dlogp
    assert gradient is not None and dlogp is not None
    saved = (*gradient, dlogp)
    if plan.options.bounded is None:
        return parts, None, saved
    entries = kept_entries(kept[0], grad_stats, plan.route)
    parts = parts._replace(bounded=bounded_report(entries, dlogp))
    written = torch.empty(plan.saving.shape, dtype=plan.saving.dtype, device=dlogp.device)
    to_keep(entries, written)
    return parts, None, (*saved, written, *stats[:3])


def _two_pass(rows: Rows, plan: Plan) -> Forward:
    """Compute the loss, and its gradients with respect to the statistics."""
    stats, kept = rows_forward(with_gradient(rows, plan), plan)
    parts, grad_stats = _scored_loss(stats, rows, plan)
    if kept is not None and plan.saving.kind == ENTRIES:
        report = bounded_report(of_kept(kept), shard=plan.head.shard)
        parts = parts._replace(bounded=report)
    return parts, None, (kept, *stats[:3], *grad_stats)


def _scored_loss(stats: RowStats, rows: Rows, plan: Plan) -> tuple[LossParts, StatsGrad]:
    """Compute the loss from statistics of the rows with a gradient, and its gradient by them."""
    logp, entropy, batch, weights, gate = _scored(stats, rows, plan)
    stage = plan.stage(batch, weights, plan.config, logp.dtype, gate)
    scored = RowStats(logp, entropy, entropy, masked_logprobs=logp if plan.masked else None)
    grad_stats = stage(slice(0, logp.numel()), scored)
    if plan.scope == "batch" and plan.active.index is not None:
        grad_stats = grad_stats.rows(plan.active.index)
    return LossParts(stage.loss(), logp, entropy, gate), grad_stats


def loss_backward(
    rows: Rows,
    plan: Plan,
    saved: tuple[Tensor | None, ...],  # of :data:`Forward`
    dloss: Tensor | None = None,  # (); None: 1
) -> Gradients:
    """Compute the gradients of a loss; that of hidden states for the rows with one."""
    if plan.keeps:
        exponentials, unit, dlogp, *sparse = saved
        assert exponentials is not None and dlogp is not None
        chosen, needs, found = with_gradient(rows, plan), plan.needs, Gradients()
        of_logp = TileGradient(exponentials, unit)
        # whatever the gradient of the loss: what is overwritten is of no use to any backward
        nonzero = dlogp != 0 if plan.leaves_out else None
        dlogp = dlogp if dloss is None else dlogp * dloss
        if sparse:  # entries give the gradients of the rows
            kept, stats = sparse[0], RowStats(*sparse[1:])  # type: ignore[arg-type]
            assert kept is not None
            found = bounded_gradients(
                entries=of_kept(kept),
                factor=dlogp,
                grad_stats=StatsGrad(dlogp),
                rows=chosen,
                stats=stats,
                route=plan.route,
                needs=needs.of_rows,
            )
            needs = needs.of_head_alone
        by_gemms = gradients_of_logp(chosen, of_logp, dlogp, plan.route, needs, nonzero)
        return found.joined(by_gemms)
    kept, stats, grad_stats = saved[0], RowStats(*saved[1:4]), StatsGrad(*saved[4:])  # type: ignore[arg-type]
    return stats_backward(with_gradient(rows, plan), stats, grad_stats.times(dloss), plan, kept)


def eager_loss(rows: Rows, plan: Plan) -> LossParts:
    """Compute the loss in torch: before the eager reference, whose autograd goes on through it, or
    without gradients."""
    stats, _ = differentiable_stats(with_gradient(rows, plan), plan)
    logp, entropy, batch, weights, gate = _scored(stats, rows, plan)
    loss, gate = weighted_loss(logp, batch, plan.config, entropy, weights, gate)
    return LossParts(loss, logp.detach(), entropy.detach(), gate)


def with_gradient(rows: Rows, plan: Plan) -> Rows:
    """Return the rows that can have a gradient, as if they were all."""
    return rows if plan.active.index is None else rows.at(plan.active.index).as_all()


def _scored(
    stats: RowStats, rows: Rows, plan: Plan
) -> tuple[Tensor, Tensor, TokenBatch, Weights, Tensor | None]:
    """Return what the loss is computed from: log-probabilities, entropy, their batch, its weights
    and gate. They are of the rows with a gradient; a gate by the entropy needs all rows.
    """
    logp, entropy, config = policy_logp(stats), stats.entropy, plan.config
    weights = static_weights(plan.batch, config, logp.dtype)
    if plan.scope != "batch":
        active = plan.active
        return logp, entropy, active.batch, active.take_weights(weights), None
    logp, entropy = with_rest(logp, entropy, rows, plan)
    copies = 1 if plan.head.shard is None else plan.head.shard.size
    gate = top_entropy_gate(entropy, config.top_entropy_quantile, copies)
    return logp, entropy, plan.batch, weights, gate


def with_rest(
    logp: Tensor, entropy: Tensor, rows: Rows, plan: Plan
) -> tuple[Tensor, Tensor]:  # (T,)
    """Complete what is known of the rows with a gradient, by a forward of the others."""
    active = plan.active
    if active.forward_only is None or logp.numel() == plan.batch.num_tokens:
        return logp, entropy
    with torch.no_grad():
        without = replace(plan, needs=Needs())
        others, _ = differentiable_stats(rows.at(active.forward_only).as_all(), without)
    return active.merge(logp, policy_logp(others)), active.merge(entropy, others.entropy)
