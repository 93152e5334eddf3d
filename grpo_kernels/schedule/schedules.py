"""How a planned call runs: gradients in the forward (one pass), or a recompute (two pass)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

import grpo_kernels.batch.host as host
from grpo_kernels.backends.base import RowStats
from grpo_kernels.batch.sampling_mask import SamplingMask
from grpo_kernels.batch.token_batch import TokenBatch
from grpo_kernels.engine.ops import HeadOptions, Tensors
from grpo_kernels.engine.retry import SPOILED_SUM, first_that_fits
from grpo_kernels.engine.sunk import sunk_stats
from grpo_kernels.engine.sweep import Gradients, Needs, forward_backward
from grpo_kernels.engine.weight_sink import WeightSink
from grpo_kernels.head.derivatives import check_plain, first_derivative_only
from grpo_kernels.head.head import Head
from grpo_kernels.linear_logprobs import head_stats
from grpo_kernels.losses import LossConfig, Metrics, PolicyLossOutput, policy_loss
from grpo_kernels.losses.policy_loss import weighted_loss
from grpo_kernels.losses.weights import static_weights
from grpo_kernels.schedule.active import ActiveRows
from grpo_kernels.schedule.fallback import ways
from grpo_kernels.schedule.loss_stage import MiddleStage, middle_stage
from grpo_kernels.schedule.main_grad import WeightGrad
from grpo_kernels.schedule.plan import HeadSettings, Plan, make_plan


class Call(NamedTuple):
    """One call of the op, decided."""

    head: Head
    batch: TokenBatch  # every valid token
    config: LossConfig
    plan: Plan
    settings: HeadSettings
    active: ActiveRows  # those with a gradient
    weight_grad: WeightGrad | None  # where that of the weight goes, None: to autograd


def one_pass(rows: Tensor, call: Call, needs: Needs) -> tuple[Tensor, Metrics]:
    """Gradients are computed in the forward, while each chunk's logits are there."""
    head = call.head
    factors = dict(zip(("lora.a", "lora.b"), head.factors, strict=True))
    check_plain(hidden=rows, weight=head.weight, bias=head.bias, **factors)
    loss, metrics = _OnePass.apply(rows, head.weight, head.bias, *head.factors, call, needs)
    return loss, metrics


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, bias, lora_a, lora_b, call: Call, needs: Needs):
        found = _active_pass(rows, call, needs)
        metrics = _loss(rows, call, found.stats.logp, found.stats.entropy).metrics
        ctx.found = found
        ctx.call, ctx.needs = call, needs
        # the batch, too: autograd then refuses a backward after a change in place
        ctx.save_for_backward(rows, weight, bias, lora_a, lora_b, *call.batch.tensors)
        return found.stage.loss(found.stats.logp.dtype), metrics

    @staticmethod
    @first_derivative_only("linear_policy_loss")
    def backward(ctx, inputs, dloss, dmetrics):
        # the first backward takes the gradients over, so that the largest is never copied; a
        # second one, under retain_graph, computes them again
        found, ctx.found = ctx.found, None
        if found is None:
            found = _repeated_pass(inputs[0], ctx.call, ctx.needs)
        if found.sink is not None:
            ctx.call.weight_grad.settle(found.sink, dloss)
        dhidden, *others = (
            _scaled_(gradient, dloss, x.dtype) if gradient is not None else None
            for gradient, x in zip(found.gradients, inputs, strict=False)
        )
        index = ctx.call.active.index
        if dhidden is not None and index is not None:
            dhidden = dhidden.new_zeros(inputs[0].shape).index_copy(0, index, dhidden)
        return dhidden, *others, None, None


def _scaled_(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * scale`` in ``dtype``; the first is used up."""
    # no sync, and a pass saved
    unit = host.reading_is_free(scale) and scale.item() == 1
    return (gradient if unit else gradient.mul_(scale)).to(dtype)


class _Pass(NamedTuple):
    """What one pass over the rows with a gradient leaves."""

    stage: MiddleStage
    stats: RowStats  # logp is that of the policy: renormalised where the batch has a sampling mask
    gradients: Gradients
    sink: WeightSink | None  # what got the weight's gradient


def _active_pass(rows: Tensor, call: Call, needs: Needs) -> _Pass:
    """The rows with a gradient: logits, statistics, middle stage and products, chunk by chunk."""
    active, config, batch = call.active, call.config, call.active.batch
    weights, rows = active.take_weights(static_weights(call.batch, config)), active.take(rows)
    stage = middle_stage(batch, weights, config, call.plan.middle)
    sink = call.weight_grad.sink() if call.weight_grad is not None else None
    stats, gradients = forward_backward(
        rows,
        call.head,
        batch.target,
        call.plan.path.execution(call.plan.chunks, sampling_mask=batch.sampling_mask),
        stage,
        replace(needs, weight_sink=sink),
    )
    if stats.masked_logp is not None:
        stats = stats._replace(logp=stats.masked_logp)
    return _Pass(stage, stats, gradients, sink)


def _repeated_pass(rows: Tensor, call: Call, needs: Needs) -> _Pass:
    """The same again, in smaller chunks where the memory no longer lasts."""
    forced = replace(call.settings, schedule="one_pass")
    filled = call.weight_grad is not None and call.weight_grad.filled_by("one_pass")
    return first_that_fits(
        lambda way: _active_pass(rows, call._replace(plan=way.plan), needs),
        ways(forced, lambda x: make_plan(rows, call.head, call.active.batch, call.config, x)),
        lambda way: way.advice,
        lambda _: SPOILED_SUM if filled else None,
    )


def two_pass(rows: Tensor, call: Call) -> tuple[Tensor, Metrics]:
    """Log-probabilities, loss in torch, and a backward that recomputes the logits."""
    batch, sink = call.active.batch, None
    if call.weight_grad is not None and torch.is_grad_enabled():
        sink = WeightSink(call.weight_grad.buffer)  # the logits' gradients contain the loss's own
    found = _logprobs(call.active.take(rows), batch.target, batch.sampling_mask, call, sink)
    return _loss(rows, call, *found)


def _loss(rows: Tensor, call: Call, logp: Tensor, entropy: Tensor) -> PolicyLossOutput:
    """Loss and metrics from the statistics of the rows with a gradient."""
    active, batch, config = call.active, call.batch, call.config
    if call.settings.metrics == "active":
        weights = active.take_weights(static_weights(batch, config))
        return weighted_loss(logp, active.batch.occupied(), config, entropy, weights)
    if active.rest is not None:
        sampling_mask = (
            batch.sampling_mask.take(active.rest) if batch.sampling_mask is not None else None
        )
        with torch.no_grad():
            others = _logprobs(rows[active.rest], batch.target[active.rest], sampling_mask, call)
        logp, entropy = active.merge(logp, others[0]), active.merge(entropy, others[1])
    return policy_loss(logp, batch, config, entropy)


def _logprobs(
    rows: Tensor,  # (n, D)
    target: Tensor,  # (n,)
    sampling_mask: SamplingMask | None,
    call: Call,
    sink: WeightSink | None = None,
) -> tuple[Tensor, Tensor]:
    """The policy's log-probabilities of the targets, and its entropy."""
    plan, transform = call.plan, call.head.transform
    assert not isinstance(transform.temperature, Tensor)
    options = HeadOptions(
        temperature=transform.temperature,
        logit_scale=transform.logit_scale,
        softcap=transform.softcap,
        precision=plan.precision,
        backend=plan.backend,
        max_workspace_bytes=call.settings.max_workspace_bytes,
        batch_invariant=call.settings.batch_invariant,
        all_valid=True,
        lora_scaling=1.0 if call.head.lora is None else float(call.head.lora.scaling),
    )
    with torch.autocast(rows.device.type, enabled=False):
        if sink is not None:
            stats = sunk_stats(Tensors.of(rows, call.head, target, sampling_mask), options, sink)
        else:
            stats = head_stats(Tensors.of(rows, call.head, target, sampling_mask), options)
    logp = stats.logp if sampling_mask is None else stats.masked_logp
    assert logp is not None
    return logp, stats.entropy
