"""The loss per token, defined once: everything between log-probabilities and the loss.

Eager code, the fused schedules and generated GPU kernels all run these functions on (T,) vectors
and let autograd derive the gradient. :func:`policy_loss` is the loss in plain torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from grpo_kernels.batch import TOKEN_FIELDS, Segments, TokenBatch, host
from grpo_kernels.losses.config import LossConfig
from grpo_kernels.losses.metrics import Metrics, Reductions, Stat, indicator_values, stat_of
from grpo_kernels.losses.terms import (
    KL_ESTIMATORS,
    LOG_RATIO_LIMIT,
    Counted,
    Terms,
    token_mean,
    top_entropy_gate,
)


class Weights(NamedTuple):
    """Per-token weights (T,) of the policy loss and of the entropy bonus (before its coef)."""

    policy: Tensor
    entropy: Tensor | None  # None: the loss has no entropy bonus


class TokenInputs(NamedTuple):
    """The per-token inputs of the loss, all (T,) and of one dtype; None: not an input."""

    logprobs: Tensor
    entropy: Tensor | None
    advantages: Tensor
    policy_weight: Tensor
    entropy_weight: Tensor | None
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    rollout_weights: Tensor | None = None

    def rows(self, index: slice) -> TokenInputs:
        """Return the same for a range of tokens."""
        if index == slice(0, self.logprobs.shape[0]):
            return self
        return TokenInputs(*(x[index] if x is not None else None for x in self))  # type: ignore[arg-type]


class Evaluation(NamedTuple):
    """The loss per token, and the parts that metrics need, each (T,)."""

    loss: Tensor  # surrogate with its gates, plus beta * KL
    contributions: Tensor  # each token's contribution to the loss of the batch
    terms: Terms
    before_update: Tensor  # log-probabilities to compare with the rollout engine's
    kl: Tensor | None
    entropy_gate: Tensor | None
    correction: Tensor | None  # (B,) for a per-sequence mode


def static_weights(
    batch: TokenBatch, config: LossConfig, dtype: torch.dtype = torch.float64
) -> Weights:
    """Return the weight of every token, in the ``dtype`` of the log-probabilities if known."""

    def per_token(weight: Tensor | float) -> Tensor:  # (T,)
        if isinstance(weight, Tensor):
            return weight.to(dtype).expand(batch.target.shape)
        return torch.full_like(batch.advantages, weight, dtype=dtype)

    steps = batch.gradient_accumulation_steps
    entropy = None
    counted = Counted.of(batch, not config.exclude_zero_variance)
    policy = config.aggregation.weight(batch, counted, config.max_completion_length)
    if counted.tokens_of is not None:
        policy = policy * counted.tokens_of
    if config.aggregation.per_micro_batch:
        policy = policy / steps
    if config.entropy_coef != 0:
        scale = 1.0 if batch.entropy_scale is None else host.number(batch.entropy_scale)
        entropy = per_token(token_mean(batch, Counted.of(batch, True)) / steps * scale)
    return Weights(per_token(policy), entropy)


def token_inputs(batch: TokenBatch, weights: Weights, dtype: torch.dtype) -> TokenInputs:
    """Collect the inputs in ``dtype``, without log-probabilities and entropy yet."""
    tensors = (batch.advantages, *weights, *(getattr(batch, name) for name in TOKEN_FIELDS))
    advantages, *others = (None if x is None else x.to(dtype) for x in tensors)
    return TokenInputs(advantages, None, advantages, *others)  # type: ignore[arg-type]


def evaluate(
    x: TokenInputs,
    segments: Segments,
    config: LossConfig,
    entropy_gate: Tensor | None = None,  # (T,) if known; computing it is a collective
) -> Evaluation:
    """Evaluate the loss per token: surrogate, gates, rollout correction, then the KL penalty."""
    old, before = _compared_with(x, config)
    correction, token_correction = _correction(x, before, segments, config)
    delta = x.logprobs - old
    log_ratio = config.ratio_level.map(delta, x.logprobs, segments)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    terms = Terms(
        logprobs=x.logprobs,
        old_logprobs=old,
        delta=delta,
        log_ratio=log_ratio,
        ratio=log_ratio.exp(),
        advantages=x.advantages,
        rollout_weight=token_correction,
        segments=segments,
    )
    loss = config.surrogate(terms)
    if config.off_policy_mask_threshold is not None:
        # off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556); NaN: unknown
        sampling = old if x.rollout_logprobs is None else x.rollout_logprobs
        drift = segments.mean((sampling - x.logprobs.detach()).nan_to_num(nan=0.0))
        near = segments.expand(drift) <= config.off_policy_mask_threshold
        loss = loss * ((x.advantages >= 0) | near).to(loss.dtype)
    if config.top_entropy_quantile == 1:
        entropy_gate = None
    elif entropy_gate is None:
        assert x.entropy is not None  # checked at the API edge
        entropy_gate = top_entropy_gate(x.entropy, config.top_entropy_quantile)
    if entropy_gate is not None:
        loss = loss * entropy_gate
    if token_correction is not None and not config.surrogate.uses_rollout_weight:
        loss = loss * token_correction
    kl = None
    if config.beta != 0:
        assert x.ref_logprobs is not None  # checked at the API edge
        kl = KL_ESTIMATORS[config.kl_estimator](x.ref_logprobs - x.logprobs)
        if config.use_bias_correction_kl:  # changes the gradient even where the ratio is 1
            kl = kl * terms.ratio
        loss = loss + config.beta * kl
    contributions = loss * x.policy_weight
    if config.entropy_coef != 0:
        assert x.entropy is not None and x.entropy_weight is not None  # checked at the API edge
        weight = x.entropy_weight
        if entropy_gate is not None:  # a mean over the gated tokens only
            gated = segments.sum_all(entropy_gate).clamp(min=1)
            weight = weight * entropy_gate * (segments.num_tokens / gated)
        contributions = contributions - config.entropy_coef * weight * x.entropy
    return Evaluation(
        loss=loss,
        contributions=contributions,
        terms=terms,
        before_update=before,
        kl=kl,
        entropy_gate=entropy_gate,
        correction=correction,
    )


def run_stage(
    x: TokenInputs, segments: Segments, config: LossConfig, entropy_gate: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each token's contribution to the loss, and its gradients by autograd, each (T,).

    The gradients are with respect to the log-probabilities and to the entropy (None if the loss
    does not need it).
    """
    names = ("logprobs", "entropy") if config.entropy_coef != 0 else ("logprobs",)
    with torch.enable_grad(), _without_hooks():
        inputs = {name: getattr(x, name).detach().requires_grad_() for name in names}
        each = evaluate(x._replace(**inputs), segments, config, entropy_gate).contributions
        gradients = torch.autograd.grad(each, list(inputs.values()), torch.ones_like(each))
    return each.detach(), gradients[0], gradients[1] if len(gradients) > 1 else None


def _without_hooks() -> AbstractContextManager[object]:
    """Disable hooks on saved tensors for a graph that is differentiated immediately.

    Otherwise a checkpoint would run its forward again for each such backward, and offloading hooks
    would move tensors to the CPU and back.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return saved_tensors_hooks(_same, _same)


def _same(x: Tensor) -> Tensor:
    return x


def _compared_with(x: TokenInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return the old log-probabilities, and the trainer's to compare with the rollout engine's."""
    policy = x.logprobs.detach()
    old = policy if x.old_logprobs is None else x.old_logprobs
    if not config.bypasses:
        return old, old
    assert x.rollout_logprobs is not None  # checked at the API edge
    # NaN: the engine did not report it
    return torch.where(x.rollout_logprobs.isnan(), old, x.rollout_logprobs), policy


def _correction(
    x: TokenInputs, old: Tensor, segments: Segments, config: LossConfig
) -> tuple[Tensor | None, Tensor | None]:
    """Return the rollout correction as computed, (T,) or (B,), and per token, (T,)."""
    mode = config.correction_mode
    if x.rollout_weights is not None or x.rollout_logprobs is None or mode is None:
        return x.rollout_weights, x.rollout_weights
    # NaN: the engine did not report it, so nothing is corrected
    log_ratio = (old - x.rollout_logprobs).nan_to_num(nan=0.0).detach()
    low, high = config.rollout_correction_min, config.rollout_correction_max
    weight = mode.weight(log_ratio, segments, low, high)
    return weight, segments.expand(weight) if mode.per_sequence else weight


class PolicyLossOutput(NamedTuple):
    """A differentiable loss, and its metrics."""

    loss: Tensor  # (), fp32, or fp64 for fp64 inputs
    metrics: Metrics  # detached, computed when first read


def policy_loss(
    logprobs: Tensor, batch: TokenBatch, config: LossConfig, entropy: Tensor | None = None
) -> PolicyLossOutput:
    """Compute the policy loss from per-token log-probabilities.

    For log-probabilities of a padded completion::

        batch = TokenBatch.from_padded(completion_ids, advantages, completion_mask)
        loss, metrics = policy_loss(logprobs, batch, LossConfig(loss_type="dapo"))  # all (B, L)

    Args:
        logprobs: fp32 or fp64 log-probabilities of the targets at ``config.temperature``, in the
            layout that ``batch`` was built from, (B, L) or packed; or (T,), for its valid tokens
            only.
        batch: the T valid tokens. Values at other tokens are ignored.
        config: the loss.
        entropy: in nats, in the same layout; required for ``entropy_coef`` and
            ``top_entropy_quantile``, otherwise only logged.

    Returns:
        :class:`PolicyLossOutput`: the () loss, differentiable in ``logprobs`` and ``entropy``, and
        its metrics, which are computed when first read. A batch without tokens gives a
        differentiable 0.

    Raises:
        ValueError: shapes disagree, or the loss needs something that the batch does not have.
    """
    check_loss_inputs(batch, config)
    logprobs = batch.of_tokens("logprobs", logprobs)
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logprobs: expected float32 or float64, got {logprobs.dtype}")
    if entropy is not None:
        entropy = batch.of_tokens("entropy", entropy)
        if not entropy.is_floating_point():
            raise ValueError(f"entropy: expected a floating-point dtype, got {entropy.dtype}")
    elif config.needs_entropy:
        raise ValueError("entropy: expected a (T,) tensor for this loss, got None")
    loss, gate = weighted_loss(
        logprobs=logprobs,
        batch=batch,
        config=config,
        entropy=entropy,
        weights=static_weights(batch, config),
    )
    logprobs = logprobs.detach()
    entropy = None if entropy is None else entropy.detach()
    stats = partial(loss_stats, logprobs, entropy, batch, config, gate)
    metrics = Metrics(stats, logprobs, entropy)
    return PolicyLossOutput(loss, metrics.ready_for(batch))


def weighted_loss(
    logprobs: Tensor,
    batch: TokenBatch,
    config: LossConfig,
    entropy: Tensor | None,
    weights: Weights,
    entropy_gate: Tensor | None = None,  # (T,) if known
) -> tuple[Tensor, Tensor | None]:
    """Return the loss () of a batch with these token weights, and its entropy gate (T,)."""
    x = token_inputs(batch, weights, logprobs.dtype)._replace(logprobs=logprobs, entropy=entropy)
    evaluation = evaluate(x, batch.segments, config, entropy_gate)
    # in fp64 the rounded sum does not depend on how the batch was cut
    loss = evaluation.contributions.double().sum().to(logprobs.dtype)
    return loss, evaluation.entropy_gate


def check_loss_inputs(batch: TokenBatch, config: LossConfig) -> None:
    """Raise ValueError if ``batch`` lacks something that ``config`` needs, or they conflict."""
    for name, value, kind in (("batch", batch, TokenBatch), ("config", config, LossConfig)):
        if not isinstance(value, kind):
            raise ValueError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")
    if config.beta != 0 and batch.ref_logprobs is None:
        raise ValueError(
            f"ref_logprobs: expected the reference's log-probabilities for beta = {config.beta}, "
            "got None"
        )
    if config.bypasses and batch.rollout_logprobs is None:
        raise ValueError(
            "rollout_logprobs: expected the rollout engine's log-probabilities, which "
            f"{config.loss_type} computes its ratio from (with bypass_mode=False it uses the old "
            "policy's), got None"
        )
    if config.aggregation.by_prompt and batch.prompt_tokens is None:
        raise ValueError(
            "prompt_tokens: expected the number of tokens of each sequence's prompt, for a mean "
            "over prompts, got None"
        )
    if config.exclude_zero_variance and batch.active_lengths is None:
        raise ValueError(
            "active_lengths: expected them next to lengths, to tell which sequences count "
            "(exclude_zero_variance), got None"
        )
    if config.surrogate.scope == "prefix" and batch.sequence_group is not None:
        raise ValueError(
            f"sequence_group: expected None for {config.loss_type}, which sums along each sequence "
            "and needs all its tokens in order, got a group"
        )
    mode = config.correction_mode
    if batch.rollout_logprobs is None or mode is None:
        return
    if batch.rollout_weights is not None:
        raise ValueError(
            "rollout_weights: expected None, because rollout_correction_mode = "
            f"{config.rollout_correction_mode!r} computes weights from rollout_logprobs; set the "
            "mode to None to pass weights"
        )
    if config.surrogate.uses_rollout_weight and mode.per_sequence:
        raise ValueError(
            f"rollout_correction_mode: expected a token mode for {config.loss_type}, which sums "
            "token weights itself, such as 'token_truncate' or 'token_mask', got "
            f"{config.rollout_correction_mode!r}"
        )


def loss_stats(
    logprobs: Tensor,  # (T,)
    entropy: Tensor | None,  # (T,)
    batch: TokenBatch,
    config: LossConfig,
    entropy_gate: Tensor | None = None,  # (T,), from the loss
    weights: Weights | None = None,  # None: from the batch
) -> Mapping[str, Stat]:
    """Compute the statistics behind the metrics of a loss."""
    weights = static_weights(batch, config) if weights is None else weights
    x = token_inputs(batch, weights, logprobs.dtype)._replace(logprobs=logprobs, entropy=entropy)
    evaluation = evaluate(x, batch.segments, config, entropy_gate)
    values: Reductions = {}
    if evaluation.kl is not None:
        values["kl"] = "mean", evaluation.kl
    if entropy is not None:
        means, occupied = batch.segments.mean(entropy), batch.segments.lengths > 0
        values["entropy"] = "mean", entropy
        values["entropy/sequence_min"] = "min", means, occupied
        values["entropy/sequence_max"] = "max", means, occupied
        if evaluation.entropy_gate is not None:
            values["entropy_top"] = "mean", entropy, evaluation.entropy_gate > 0
    if config.entropy_coef != 0:  # the loss without the bonus: one sample per micro-batch
        total = (evaluation.loss * x.policy_weight).double().sum()
        if config.aggregation.per_micro_batch:
            total = total * batch.gradient_accumulation_steps
        values["policy_loss"] = "mean", total
    one_per_sequence = config.ratio_level.per_sequence and not batch.advantages_per_token
    reported = config.surrogate.metrics(evaluation.terms)
    values |= indicator_values(reported, batch.segments, one_per_sequence)
    ratio = evaluation.terms.ratio.double()
    values["ratio/min"] = ("min", ratio)
    values["ratio/max"] = ("max", ratio)
    values["perplexity"] = "perplexity", logprobs
    if x.rollout_logprobs is not None:  # the trainer against the rollout engine
        known = ~x.rollout_logprobs.isnan()
        difference = (evaluation.before_update - x.rollout_logprobs).double()
        for kind in ("mean", "max"):
            values[f"sampling/sampling_logp_difference/{kind}"] = kind, difference.abs(), known
        values["sampling/mismatch_kl_k1"] = "mean", -difference, known
        values["sampling/mismatch_kl_k3"] = "mean", KL_ESTIMATORS["k3"](difference), known
        values["sampling/rollout_perplexity"] = "perplexity", x.rollout_logprobs, known
    if evaluation.correction is not None:
        for kind in ("min", "mean", "max"):
            values[f"sampling/importance_sampling_ratio/{kind}"] = kind, evaluation.correction
    stats = {name: stat_of(*arguments) for name, arguments in values.items()}
    moments = torch.stack([ratio.sum(), (ratio * ratio).sum()])
    return stats | {"ratio/ess": Stat("ess", moments, stats["ratio/min"].count)}
