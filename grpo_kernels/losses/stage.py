"""The middle stage: everything between log-probabilities and the loss, defined once.

Eager code, the fused schedules and printed GPU kernels all run these functions on (T,) vectors and
let autograd derive the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.batch.token_batch import TokenBatch
from grpo_kernels.losses.config import LossConfig
from grpo_kernels.losses.gates import (
    CORRECTION_MODES,
    off_policy_gate,
    rollout_correction,
    rollout_log_ratio,
    top_entropy_gate,
)
from grpo_kernels.losses.kl import kl_penalty
from grpo_kernels.losses.ratios import log_ratio
from grpo_kernels.losses.terms import Segments, Terms
from grpo_kernels.losses.weights import Weights


class TokenInputs(NamedTuple):
    """All per-token inputs of the stage, each (T,) and of one dtype."""

    logprobs: Tensor
    entropy: Tensor | None
    advantages: Tensor
    policy_weight: Tensor
    entropy_weight: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None


class StageOutput(NamedTuple):
    """What a schedule needs of a row range, each (T,)."""

    contributions: Tensor  # the loss is their sum
    dlogp: Tensor
    dentropy: Tensor | None  # None when the loss does not read the entropy


class Evaluation(NamedTuple):
    """The stage's result, per token, with the parts that metrics are made of."""

    loss: Tensor  # (T,) surrogate with its gates, plus beta * KL
    terms: Terms
    old_logprobs: Tensor  # (T,)
    kl: Tensor | None  # (T,)
    entropy_gate: Tensor | None  # (T,)
    correction: Tensor | None  # (T,), or (B,) for a per-sequence mode


def token_inputs(
    logprobs: Tensor, entropy: Tensor | None, batch: TokenBatch, weights: Weights
) -> TokenInputs:
    """Collects the stage's inputs in the dtype of ``logprobs``."""

    def cast(value: Tensor | None) -> Tensor | None:
        return value.to(logprobs.dtype) if value is not None else None

    return TokenInputs(
        logprobs,
        entropy,
        batch.advantages.to(logprobs.dtype),
        weights.policy.to(logprobs.dtype),
        weights.entropy.to(logprobs.dtype),
        cast(batch.old_logprobs),
        cast(batch.ref_logprobs),
        cast(batch.rollout_logprobs),
    )


def segments_of(batch: TokenBatch) -> Segments:
    """The batch's sequence reductions."""
    return Segments(batch.segment_sum, batch.segment_mean, batch.expand)


def evaluate(x: TokenInputs, segments: Segments, config: LossConfig) -> Evaluation:
    """Per-token loss and its parts.

    The modifiers apply in this order: off-policy gate, top-entropy gate, rollout correction (unless
    the surrogate already contains it), then the KL penalty, which none of them touches.
    """
    old = x.logprobs.detach() if x.old_logprobs is None else x.old_logprobs
    correction, token_correction = _correction(x, old, segments, config)
    terms = _terms(x, old, token_correction, segments, config)
    loss = config.surrogate(terms, config)
    if config.off_policy_mask_threshold is not None:
        sampling = old if x.rollout_logprobs is None else x.rollout_logprobs
        threshold = config.off_policy_mask_threshold
        loss = loss * off_policy_gate(x.logprobs, sampling, x.advantages, threshold, segments)
    entropy_gate = None
    if config.top_entropy_quantile < 1:
        assert x.entropy is not None  # checked at the API edge
        entropy_gate = top_entropy_gate(x.entropy, config.top_entropy_quantile)
        loss = loss * entropy_gate
    if token_correction is not None and not config.surrogate.uses_rollout_weight:
        loss = loss * token_correction
    kl = None
    if config.beta != 0:
        assert x.ref_logprobs is not None  # checked at the API edge
        kl = kl_penalty(
            x.logprobs,
            x.ref_logprobs,
            terms.ratio,
            config.kl_estimator,
            config.use_bias_correction_kl,
        )
        loss = loss + config.beta * kl
    return Evaluation(loss, terms, old, kl, entropy_gate, correction)


def contributions(x: TokenInputs, evaluation: Evaluation, config: LossConfig) -> Tensor:
    """What each token adds to the loss, (T,): the loss is the sum."""
    policy = evaluation.loss * x.policy_weight
    if config.entropy_coef == 0:
        return policy
    assert x.entropy is not None  # checked at the API edge
    weight = x.entropy_weight
    gate = evaluation.entropy_gate
    if gate is not None:  # a mean over the kept tokens only
        weight = weight * gate * (gate.numel() / gate.sum().clamp(min=1))
    return policy - config.entropy_coef * weight * x.entropy


def run_stage(x: TokenInputs, segments: Segments, config: LossConfig) -> StageOutput:
    """The loss of each token and its gradients, by autograd."""
    with torch.enable_grad():
        logprobs = x.logprobs.detach().requires_grad_()
        inputs = [logprobs]
        x = x._replace(logprobs=logprobs)
        if config.entropy_coef != 0:
            assert x.entropy is not None  # the schedules always compute it
            inputs.append(x.entropy.detach().requires_grad_())
            x = x._replace(entropy=inputs[1])
        each = contributions(x, evaluate(x, segments, config), config)
        gradients = torch.autograd.grad(each.sum(), inputs)
    dentropy = gradients[1] if len(gradients) > 1 else None
    return StageOutput(each.detach(), gradients[0], dentropy)


def _correction(
    x: TokenInputs, old: Tensor, segments: Segments, config: LossConfig
) -> tuple[Tensor | None, Tensor | None]:
    """The rollout weight as it is, (T,) or (B,), and per token."""
    if x.rollout_logprobs is None or config.rollout_correction_mode is None:
        return None, None
    mode = CORRECTION_MODES[config.rollout_correction_mode]
    low, high = config.rollout_correction_min, config.rollout_correction_max
    difference = rollout_log_ratio(old, x.rollout_logprobs)
    weight = rollout_correction(difference, mode, low, high, segments)
    return weight, segments.expand(weight) if mode.per_sequence else weight


def _terms(
    x: TokenInputs,
    old: Tensor,
    correction: Tensor | None,
    segments: Segments,
    config: LossConfig,
) -> Terms:
    delta = x.logprobs - old
    mapped = log_ratio(config.ratio_level, delta, x.logprobs, segments)
    return Terms(x.logprobs, delta, mapped, mapped.exp(), x.advantages, correction, segments)
