"""How a planned call runs: gradients in the forward (one pass), or a recompute (two pass)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_kernels.batch import TokenBatch
from grpo_kernels.logprob.head import Head
from grpo_kernels.logprob.op import linear_logprobs
from grpo_kernels.logprob.rows import RowStats
from grpo_kernels.logprob.schedule import (
    Gradients,
    Needs,
    forward_backward,
    fp16_gradient_scale,
)
from grpo_kernels.losses import LossConfig, Metrics, policy_loss
from grpo_kernels.losses.weights import Weights, static_weights
from grpo_kernels.middle import MiddleStage, middle_stage
from grpo_kernels.plan import HeadSettings, Plan


class Call(NamedTuple):
    """One call of the op, decided."""

    head: Head
    batch: TokenBatch  # every valid token
    config: LossConfig
    plan: Plan
    settings: HeadSettings
    keep: Tensor | None  # index of the rows with a gradient, None: all
    active: TokenBatch  # those rows


def one_pass(rows: Tensor, call: Call, needs: Needs) -> tuple[Tensor, Metrics]:
    """Gradients are computed in the forward, while each chunk's logits are there."""
    loss, metrics = _OnePass.apply(rows, call.head.weight, call.head.bias, call, needs)
    return loss, metrics


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, bias, call: Call, needs: Needs):
        stage, stats, gradients = _active_pass(rows, call, needs)
        logp, entropy = _with_inactive(rows, call, stats.logp, stats.entropy)
        metrics = policy_loss(logp, call.batch, call.config, entropy).metrics
        ctx.gradients = gradients
        ctx.call, ctx.needs = call, needs
        ctx.save_for_backward(rows, weight, bias)
        return stage.loss(logp.dtype), metrics

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, dmetrics):
        inputs = ctx.saved_tensors
        # the first backward takes the gradients over, so that the largest is never copied; a
        # second one, under retain_graph, computes them again
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            *_, gradients = _active_pass(inputs[0], ctx.call, ctx.needs)
        dhidden, dweight, dbias = (
            _scaled_(gradient, dloss, x.dtype) if gradient is not None else None
            for gradient, x in zip(gradients, inputs, strict=True)
        )
        keep = ctx.call.keep
        if dhidden is not None and keep is not None:
            dhidden = dhidden.new_zeros(inputs[0].shape).index_copy(0, keep, dhidden)
        return dhidden, dweight, dbias, None, None


def _scaled_(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * scale`` in ``dtype``; the first is used up."""
    # no sync, and a pass saved
    unit = scale.device.type == "cpu" and scale.item() == 1
    return (gradient if unit else gradient.mul_(scale)).to(dtype)


def _active_pass(rows: Tensor, call: Call, needs: Needs) -> tuple[MiddleStage, RowStats, Gradients]:
    """The rows with a gradient: logits, statistics, middle stage and products, chunk by chunk.

    The statistics' ``logp`` is that of the policy: renormalised where the batch has a kept set.
    """
    batch, config = call.active, call.config
    weights = static_weights(call.batch, config)
    if call.keep is not None:
        rows = rows[call.keep]
        weights = Weights(*(weight[call.keep] for weight in weights))
    stage = middle_stage(batch, weights, config, call.plan.middle)
    stats, gradients = forward_backward(
        rows,
        call.head,
        batch.target,
        call.plan.path.execution(call.plan.chunks, kept=batch.kept),
        stage,
        needs,
        fp16_gradient_scale(rows, _largest_coefficient(batch, weights, config)),
    )
    if stats.kept_logp is not None:
        stats = stats._replace(logp=stats.kept_logp)
    return stage, stats, gradients


def _largest_coefficient(batch: TokenBatch, weights: Weights, config: LossConfig) -> Tensor:
    """About the largest ``dL/dlogp`` or ``dL/dentropy`` at ratio 1, a () tensor."""
    largest = weights.policy * (batch.advantages.abs() + config.beta)
    largest = largest + abs(config.entropy_coef) * weights.entropy
    if largest.numel() == 0:
        return largest.new_ones(())
    return torch.where(largest.amax() > 0, largest.amax(), 1.0)


def _with_inactive(
    rows: Tensor, call: Call, logp: Tensor, entropy: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropy of all rows, from those of the rows with a gradient.

    The others run forward only.
    """
    if call.keep is None:
        return logp, entropy
    rest = torch.ones_like(call.batch.target, dtype=torch.bool)
    rest = rest.index_fill(0, call.keep, False).nonzero().squeeze(-1)
    with torch.no_grad():
        others = _logprobs(rows[rest], call.batch.select(rest), call)
    whole = logp.new_empty(call.batch.num_tokens)
    return (
        whole.index_copy(0, call.keep, logp).index_copy(0, rest, others[0]),
        whole.index_copy(0, call.keep, entropy).index_copy(0, rest, others[1]),
    )


def two_pass(rows: Tensor, call: Call) -> tuple[Tensor, Metrics]:
    """Log-probabilities, loss in torch, and a backward that recomputes the logits."""
    active = rows if call.keep is None else rows[call.keep]
    logp, entropy = _with_inactive(rows, call, *_logprobs(active, call.active, call))
    return policy_loss(logp, call.batch, call.config, entropy)


def _logprobs(rows: Tensor, batch: TokenBatch, call: Call) -> tuple[Tensor, Tensor]:
    """The policy's log-probabilities of ``batch.target``, and its entropy."""
    transform = call.head.transform
    kind = "logprobs" if batch.kept is None else "kept_logprobs"
    with torch.autocast(rows.device.type, enabled=False):
        weight = call.head.weight.to(rows.dtype)
        out = linear_logprobs(
            rows,
            weight,
            batch.target,
            bias=call.head.bias,
            temperature=transform.temperature,
            logit_scale=transform.logit_scale,
            softcap=transform.softcap,
            outputs=(kind, "entropy"),
            precision=call.plan.precision,
            backend=call.plan.backend,
            max_workspace_bytes=call.settings.max_workspace_bytes,
            kept=batch.kept,
            batch_invariant=call.settings.batch_invariant,
        )
    logp = getattr(out, kind)
    assert logp is not None and out.entropy is not None
    return logp, out.entropy
