"""The loss of a token, defined once: everything between log-probabilities and the loss.

Eager code, the fused schedules and generated GPU kernels all run these functions on (T,) vectors
and let autograd derive the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.batch import Segments, TokenBatch, host
from grpo_kernels.losses.aggregation import inverse, tokens_in_micro_batch
from grpo_kernels.losses.config import LossConfig
from grpo_kernels.losses.gates import (
    off_policy_gate,
    rollout_correction,
    rollout_log_ratio,
    top_entropy_gate,
)
from grpo_kernels.losses.kl import kl_penalty
from grpo_kernels.losses.ratios import Terms, log_ratio


class Weights(NamedTuple):
    """Per-token factors (T,), fp64, of the policy loss and of the entropy bonus (before its coef).

    A loss takes them in the dtype of its log-probabilities, which may be wider than the advantages.
    """

    policy: Tensor
    entropy: Tensor | None  # None: the loss has no entropy bonus


class TokenInputs(NamedTuple):
    """All per-token inputs of the loss, each (T,) and of one dtype; None: the loss has none."""

    logprobs: Tensor
    entropy: Tensor | None
    advantages: Tensor
    policy_weight: Tensor
    entropy_weight: Tensor | None
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    rollout_weights: Tensor | None = None

    def rows(self, index: slice | Tensor) -> TokenInputs:
        """Return the same for a subset of tokens."""
        if index == slice(0, self.logprobs.shape[0]):
            return self
        return TokenInputs(*(x[index] if x is not None else None for x in self))  # type: ignore[arg-type]


class StageOutput(NamedTuple):
    """What a schedule needs of a row range, each (T,)."""

    contributions: Tensor  # the loss is their sum
    dlogp: Tensor
    dentropy: Tensor | None  # None when the loss does not read the entropy


class Evaluation(NamedTuple):
    """The loss per token, with the parts that metrics are made of."""

    loss: Tensor  # (T,) surrogate with its gates, plus beta * KL
    terms: Terms
    old_logprobs: Tensor  # (T,)
    kl: Tensor | None  # (T,)
    entropy_gate: Tensor | None  # (T,)
    correction: Tensor | None  # (T,), or (B,) for a per-sequence mode


def static_weights(batch: TokenBatch, config: LossConfig) -> Weights:
    """Weigh every token of ``batch``."""
    steps = batch.gradient_accumulation_steps
    policy = config.aggregation.weight(batch, config.max_completion_length)
    if config.aggregation.per_micro_batch:
        policy = policy / steps
    if config.entropy_coef == 0:
        return Weights(_per_token(policy, batch), None)
    entropy = inverse(tokens_in_micro_batch(batch)) / steps
    if batch.entropy_scale is not None:
        entropy = entropy * batch.entropy_scale
    return Weights(_per_token(policy, batch), _per_token(entropy, batch))


def _per_token(weight: Tensor | float, batch: TokenBatch) -> Tensor:
    """Return the weight per token, (T,)."""
    like = batch.advantages
    if isinstance(weight, Tensor) and not (weight.dim() == 0 and host.reading_is_free(weight)):
        return weight.double().expand(like.shape)
    number = host.values(weight) if isinstance(weight, Tensor) else weight
    return torch.full_like(like, number, dtype=torch.float64)


def token_inputs(
    logprobs: Tensor, entropy: Tensor | None, batch: TokenBatch, weights: Weights
) -> TokenInputs:
    """Collect the inputs in the dtype of ``logprobs``."""

    def cast(value: Tensor | None) -> Tensor | None:
        return value.to(logprobs.dtype) if value is not None else None

    rest = (batch.advantages, *weights, batch.old_logprobs, batch.ref_logprobs)
    rollout = (batch.rollout_logprobs, batch.rollout_weights)
    return TokenInputs(logprobs, entropy, *map(cast, (*rest, *rollout)))  # type: ignore[arg-type]


def evaluate(
    x: TokenInputs,
    segments: Segments,
    config: LossConfig,
    entropy_gate: Tensor | None = None,  # (T,), where it is known: it joins all processes
) -> Evaluation:
    """Evaluate the loss per token, with its parts.

    The modifiers apply in this order: off-policy gate, top-entropy gate, rollout correction (unless
    the surrogate already contains it), then the KL penalty, which none of them touches.
    """
    old = x.logprobs.detach() if x.old_logprobs is None else x.old_logprobs
    correction, token_correction = _correction(x, old, segments, config)
    terms = _terms(x, old, token_correction, segments, config)
    loss = config.surrogate(terms)
    if config.off_policy_mask_threshold is not None:
        sampling = old if x.rollout_logprobs is None else x.rollout_logprobs
        threshold = config.off_policy_mask_threshold
        loss = loss * off_policy_gate(x.logprobs, sampling, x.advantages, threshold, segments)
    if config.top_entropy_quantile == 1:
        entropy_gate = None
    else:
        assert x.entropy is not None  # checked at the API edge
        if entropy_gate is None:
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
    """Return each token's contribution to the loss, (T,): their sum is the loss."""
    policy = evaluation.loss * x.policy_weight
    if config.entropy_coef == 0:
        return policy
    assert x.entropy is not None and x.entropy_weight is not None  # checked at the API edge
    weight = x.entropy_weight
    gate = evaluation.entropy_gate
    if gate is not None:  # a mean over the gated tokens only
        segments = evaluation.terms.segments
        weight = weight * gate * (segments.num_tokens / segments.sum_all(gate).clamp(min=1))
    return policy - config.entropy_coef * weight * x.entropy


def run_stage(
    x: TokenInputs, segments: Segments, config: LossConfig, entropy_gate: Tensor | None = None
) -> StageOutput:
    """Return the loss of each token and its gradients, by autograd."""
    with torch.enable_grad():
        logprobs = x.logprobs.detach().requires_grad_()
        inputs = [logprobs]
        x = x._replace(logprobs=logprobs)
        if config.entropy_coef != 0:
            assert x.entropy is not None  # the schedules always compute it
            inputs.append(x.entropy.detach().requires_grad_())
            x = x._replace(entropy=inputs[1])
        each = contributions(x, evaluate(x, segments, config, entropy_gate), config)
        gradients = torch.autograd.grad(each, inputs, torch.ones_like(each))
    dentropy = gradients[1] if len(gradients) > 1 else None
    return StageOutput(each.detach(), gradients[0], dentropy)


def _correction(
    x: TokenInputs, old: Tensor, segments: Segments, config: LossConfig
) -> tuple[Tensor | None, Tensor | None]:
    """Return the rollout weight as it is, (T,) or (B,), and per token."""
    if x.rollout_weights is not None:
        return x.rollout_weights, x.rollout_weights
    mode = config.correction_mode
    if x.rollout_logprobs is None or mode is None:
        return None, None
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
