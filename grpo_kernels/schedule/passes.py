"""The two schedules of a loss, without autograd: one pass over the head, or two.

One pass computes gradients in the forward, while each chunk's logits are in memory, or in the
backward from exponentials that the forward saved: three GEMMs. Two passes compute the logits again
for the backward, four GEMMs, unless the forward saved something to replace them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

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
    pack_entries,
    rows_forward,
    saved_entries,
    stats_backward,
    unpack_entries,
)
from grpo_kernels.head import matmul_precision, stats_dtype
from grpo_kernels.losses import (
    Weights,
    static_weights,
    token_inputs,
    top_entropy_gate,
    weighted_loss,
)
from grpo_kernels.schedule.chunk_loss import chunk_loss, policy_logprobs, sum_losses
from grpo_kernels.schedule.loss_plan import Plan


class LossParts(NamedTuple):
    """A loss, and the statistics behind it."""

    loss: Tensor  # ()
    logprobs: Tensor  # (K,) of the rows with a gradient, or (T,) of all
    entropy: Tensor  # for the same rows
    entropy_gate: Tensor | None = None  # (T,)
    bounded: Tensor | None = None  # (6,) REPORT of a sparse backward


class LossForward(NamedTuple):
    """The result of :func:`loss_forward`."""

    parts: LossParts
    gradients: Gradients | None = None  # for the rows with one, if the forward computes them
    saved: tuple[Tensor | None, ...] = ()  # for :func:`loss_backward`


def loss_forward(hidden: Tensor, plan: Plan) -> LossForward:
    """Compute the loss of a batch, and its gradients or the tensors for the backward, as planned.

    ``hidden`` (N, D) are the hidden states at all positions of the batch's layout.
    """
    if not plan.needs.any:
        return LossForward(eager_loss(hidden, plan), Gradients())
    if plan.keeps:
        return _save_gradient(hidden, plan)
    return (_one_pass if plan.schedule == "one_pass" else _two_pass)(hidden, plan)


def _one_pass(hidden: Tensor, plan: Plan) -> LossForward:
    """Compute logits, statistics, loss and gradients, chunk by chunk."""
    batch = plan.active.batch
    rows = rows_with_gradient(hidden, plan)
    route = plan.route
    chunks = plan.chunks
    dtype = stats_dtype(hidden.dtype)
    weights = plan.active.select_weights(static_weights(plan.batch, plan.config, dtype))
    inputs = token_inputs(batch, weights, dtype)
    losses = list[Tensor]()
    needs = plan.needs
    weight_grad = plan.weight_grad.until_scaled
    sums: GradientSums | BoundedSums
    if plan.options.bounded is None:
        sums = GradientSums(rows, needs, len(chunks), weight_grad=weight_grad)
    else:
        sums = BoundedSums(rows, needs, len(chunks), route=route, weight_grad=weight_grad)

    def consume(chunk: Chunk) -> None:
        loss, grad_stats = chunk_loss(
            chunk.stats,
            chunk.part,
            inputs=inputs,
            batch=batch,
            config=plan.config,
            method=plan.method,
        )
        losses.append(loss)
        sums.add_chunk(chunk, grad_stats, route)

    with matmul_precision(route.device, route.precision):
        stats = chunked_loop(rows, route, chunks, consume=consume, with_gradient=plan.with_gradient)
        gradients = sums.finish()
    loss = sum_losses(losses, inputs.logprobs)
    report = sums.report if isinstance(sums, BoundedSums) else None
    parts = LossParts(loss, policy_logprobs(stats), stats.entropy, bounded=report)
    return LossForward(parts, gradients)


def _save_gradient(hidden: Tensor, plan: Plan) -> LossForward:
    """Compute the loss, and save the gradient of the log-probabilities."""
    chunks = list[Chunk]()
    with matmul_precision(plan.route.device, plan.route.precision):
        stats = chunked_loop(
            rows_with_gradient(hidden, plan),
            plan.route,
            plan.chunks,
            consume=chunks.append,
            with_gradient=plan.with_gradient,
        )
    parts, grad_stats = _loss_of_stats(stats, hidden, plan)
    gradient = chunks[0].gradient
    dlogp = grad_stats.dlogp
    assert gradient is not None and dlogp is not None
    saved = (*gradient, dlogp)
    if plan.options.bounded is None:
        return LossForward(parts, saved=saved)
    entries = saved_entries(chunks[0], grad_stats, plan.route)
    parts = parts._replace(bounded=bounded_report(entries, dlogp))
    packed = torch.empty(plan.saved.shape, dtype=plan.saved.dtype, device=dlogp.device)
    pack_entries(entries, packed)
    return LossForward(parts, saved=(*saved, packed, *stats.for_backward))


def _two_pass(hidden: Tensor, plan: Plan) -> LossForward:
    """Compute the loss, and its gradients with respect to the statistics."""
    stats, saved = rows_forward(rows_with_gradient(hidden, plan), plan.stats)
    parts, grad_stats = _loss_of_stats(stats, hidden, plan)
    if saved is not None and plan.saved.kind == ENTRIES:
        report = bounded_report(unpack_entries(saved), shard=plan.head.shard)
        parts = parts._replace(bounded=report)
    return LossForward(parts, saved=(saved, *stats.for_backward, *grad_stats))


def _loss_of_stats(stats: RowStats, hidden: Tensor, plan: Plan) -> tuple[LossParts, StatsGrad]:
    """Compute the loss from statistics of the rows with a gradient, and its gradients by these."""
    x = _loss_inputs(stats, hidden, plan)
    loss, grad_stats = chunk_loss(
        RowStats(
            x.logprobs,
            x.entropy,
            x.entropy,
            masked_logprobs=x.logprobs if plan.stats.masked else None,
        ),
        slice(0, x.logprobs.numel()),
        inputs=token_inputs(x.batch, x.weights, x.logprobs.dtype),
        batch=x.batch,
        config=plan.config,
        method=plan.method,
        entropy_gate=x.entropy_gate,
    )
    if plan.scope == "batch" and plan.active.selection.index is not None:
        grad_stats = grad_stats.rows(plan.active.selection.index)
    parts = LossParts(sum_losses([loss], loss), x.logprobs, x.entropy, x.entropy_gate)
    return parts, grad_stats


def loss_backward(
    hidden: Tensor,
    plan: Plan,
    saved: tuple[Any, ...],  # of :class:`LossForward`
    dloss: Tensor | None = None,  # (); None: 1
) -> Gradients:
    """Compute the gradients of a loss; dhidden only for the rows with a gradient."""
    rows = rows_with_gradient(hidden, plan)
    if plan.keeps:
        return _backward_of_gradient(rows, plan, saved, dloss)
    of_forward, *of_stats = saved
    stats = RowStats(*of_stats[:3])
    grad_stats = StatsGrad(*of_stats[3:])
    return stats_backward(
        rows=rows,
        stats=stats,
        grad_stats=grad_stats.times(dloss),
        plan=plan.stats,
        saved=of_forward,
    )


def _backward_of_gradient(
    rows: Rows, plan: Plan, saved: tuple[Any, ...], dloss: Tensor | None
) -> Gradients:
    """Compute gradients from the gradients of the log-probabilities that the forward saved."""
    exponentials, unit, dlogp, *sparse = saved
    # whatever the gradient of the loss: no backward needs the rows that are overwritten
    nonzero = dlogp != 0 if plan.leaves_out else None
    dlogp = dlogp if dloss is None else dlogp * dloss
    needs = plan.needs
    of_rows = Gradients()
    if sparse:  # entries give the gradients of the rows
        packed, *stats = sparse
        of_rows = bounded_gradients(
            entries=unpack_entries(packed),
            factor=dlogp,
            grad_stats=StatsGrad(dlogp),
            rows=rows,
            stats=RowStats(*stats),
            route=plan.route,
            needs=needs.of_rows,
            weight_grad=plan.weight_grad,
        )
        needs = needs.of_head_alone
    by_gemms = gradients_of_logp(
        rows=rows,
        gradient=TileGradient(exponentials, unit),
        dlogp=dlogp,
        route=plan.route,
        needs=needs,
        weight_grad=plan.weight_grad,
        nonzero=nonzero,
    )
    return of_rows.joined(by_gemms)


def eager_loss(hidden: Tensor, plan: Plan) -> LossParts:
    """Compute the loss in torch: without gradients, or with autograd of the eager reference."""
    stats, _ = differentiable_stats(rows_with_gradient(hidden, plan), plan.stats)
    x = _loss_inputs(stats, hidden, plan)
    loss, gate = weighted_loss(
        logprobs=x.logprobs,
        batch=x.batch,
        config=plan.config,
        entropy=x.entropy,
        weights=x.weights,
        entropy_gate=x.entropy_gate,
    )
    return LossParts(loss, x.logprobs.detach(), x.entropy.detach(), gate)


def rows_with_gradient(hidden: Tensor, plan: Plan) -> Rows:
    """Return the rows that can have a gradient, from states at all positions of the layout."""
    batch = plan.active.batch
    return Rows(
        hidden=hidden if batch.rows is None else hidden.index_select(0, batch.rows),
        head=plan.head,
        target=batch.target,
        sampling_mask=batch.sampling_mask,
    )


def _rows_without_gradient(hidden: Tensor, index: Tensor, plan: Plan) -> Rows:
    """Return the rows of the tokens ``index``, from states at all positions of the layout."""
    batch = plan.batch
    mask = batch.sampling_mask
    positions = index if batch.rows is None else batch.rows[index]
    return Rows(
        hidden=hidden.index_select(0, positions),
        head=plan.head,
        target=batch.target[index],
        sampling_mask=None if mask is None else mask.take(index),
    )


class _LossInputs(NamedTuple):
    """The inputs of the loss for the rows with a gradient, or for all rows with an entropy gate."""

    logprobs: Tensor
    entropy: Tensor
    batch: TokenBatch
    weights: Weights
    entropy_gate: Tensor | None = None


def _loss_inputs(stats: RowStats, hidden: Tensor, plan: Plan) -> _LossInputs:
    logprobs, entropy = policy_logprobs(stats), stats.entropy
    weights = static_weights(plan.batch, plan.config, logprobs.dtype)
    if plan.scope != "batch":
        active = plan.active
        return _LossInputs(logprobs, entropy, active.batch, active.select_weights(weights))
    logprobs, entropy = with_other_rows(logprobs, entropy, hidden, plan)
    copies = 1 if plan.head.shard is None else plan.head.shard.size
    gate = top_entropy_gate(entropy, plan.config.top_entropy_quantile, copies)
    return _LossInputs(
        logprobs=logprobs, entropy=entropy, batch=plan.batch, weights=weights, entropy_gate=gate
    )


def with_other_rows(
    logprobs: Tensor, entropy: Tensor, hidden: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:  # (T,)
    """Add the statistics of the rows without a gradient, which run a forward here."""
    active = plan.active
    if active.forward_only is None or logprobs.numel() == plan.batch.num_tokens:
        return logprobs, entropy
    others = _rows_without_gradient(hidden, active.forward_only, plan)
    with torch.no_grad():
        stats, _ = differentiable_stats(others, replace(plan.stats, needs=Needs()))
    logprobs = active.merge(logprobs, policy_logprobs(stats))
    return logprobs, active.merge(entropy, stats.entropy)
