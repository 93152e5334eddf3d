"""policy_loss: the loss and its metrics from log-probabilities, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.batch import TokenBatch
from grpo_kernels.losses.config import LossConfig
from grpo_kernels.losses.kl import KL_ESTIMATORS
from grpo_kernels.losses.metrics import (
    LazyMetrics,
    Metrics,
    Stat,
    extreme_stat,
    indicator_stats,
    mean_stat,
)
from grpo_kernels.losses.stage import (
    Evaluation,
    TokenInputs,
    Weights,
    contributions,
    evaluate,
    static_weights,
    token_inputs,
)


class PolicyLossOutput(NamedTuple):
    """A loss that can be differentiated, and what to log beside it."""

    loss: Tensor  # ()
    metrics: Metrics


def policy_loss(
    logprobs: Tensor, batch: TokenBatch, config: LossConfig, entropy: Tensor | None = None
) -> PolicyLossOutput:
    """Compute the policy loss from per-token log-probabilities.

    For log-probabilities of a padded completion::

        batch = TokenBatch.from_padded(completion_ids, advantages, completion_mask)
        loss, metrics = policy_loss(logprobs, batch, LossConfig(loss_type="dapo"))  # all (B, L)

    Args:
        logprobs: fp32 or fp64 of the targets, at ``config.temperature``, in the layout that
            ``batch`` was made from, (B, L) or packed; or (T,), of its valid tokens alone.
        batch: the T valid tokens. Values at other tokens are not looked at.
        config: the loss.
        entropy: likewise, in nats; needed for ``entropy_coef`` and ``top_entropy_quantile``,
            otherwise only logged.

    Returns:
        The () loss, differentiable in ``logprobs`` and ``entropy``, and its metrics, which are
        computed when they are read. A batch without tokens gives 0 with a live graph.

    Raises:
        ValueError: shapes disagree, or the loss needs something the batch does not have.
    """
    check_loss_inputs(batch, config)
    logprobs = batch.of_tokens("logprobs", logprobs)
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logprobs: expected float32 or float64, got {logprobs.dtype}")
    if entropy is None and config.needs_entropy:
        raise ValueError("entropy: expected a (T,) tensor for this loss, got None")
    entropy = None if entropy is None else batch.of_tokens("entropy", entropy)
    if entropy is not None and not entropy.is_floating_point():
        raise ValueError(f"entropy: expected a floating-point dtype, got {entropy.dtype}")
    loss, gate = weighted_loss(logprobs, batch, config, entropy, static_weights(batch, config))
    entropy = None if entropy is None else entropy.detach()
    metrics = LazyMetrics(
        loss_stats, batch, config, gate, logprobs=logprobs.detach(), entropy=entropy
    )
    return PolicyLossOutput(loss, metrics.ready_for(batch))


def weighted_loss(
    logprobs: Tensor,
    batch: TokenBatch,
    config: LossConfig,
    entropy: Tensor | None,
    weights: Weights,
    entropy_gate: Tensor | None = None,  # (T,), where it is known
) -> tuple[Tensor, Tensor | None]:
    """Return the loss () of a batch whose tokens have these weights, and its entropy gate (T,)."""
    x = token_inputs(logprobs, entropy, batch, weights)
    evaluation = evaluate(x, batch.segments, config, entropy_gate)
    # fp64 makes the sum independent of how the batch was cut
    loss = contributions(x, evaluation, config).double().sum().to(logprobs.dtype)
    return loss, evaluation.entropy_gate


def check_loss_inputs(batch: TokenBatch, config: LossConfig) -> None:
    """Raise ValueError if ``batch`` lacks what ``config`` needs, or they cannot go together."""
    for name, value, kind in (("batch", batch, TokenBatch), ("config", config, LossConfig)):
        if not isinstance(value, kind):
            raise ValueError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")
    if config.beta != 0 and batch.ref_logprobs is None:
        raise ValueError(
            f"ref_logprobs: expected the reference's log-probabilities for beta = {config.beta}, "
            "got None"
        )
    mode = config.correction_mode
    if batch.rollout_logprobs is None or mode is None:
        return
    if batch.rollout_weights is not None:
        raise ValueError(
            "rollout_weights: expected None where rollout_correction_mode = "
            f"{config.rollout_correction_mode!r} makes weights of rollout_logprobs; set it to None"
        )
    if config.surrogate.uses_rollout_weight and mode.per_sequence:
        raise ValueError(
            f"rollout_correction_mode: {config.loss_type} sums token weights itself and expects "
            "'token_truncate' or 'token_mask' with rollout_logprobs, got "
            f"{config.rollout_correction_mode!r}"
        )


def loss_stats(
    logprobs: Tensor,  # (T,)
    entropy: Tensor | None,  # (T,)
    batch: TokenBatch,
    config: LossConfig,
    entropy_gate: Tensor | None = None,  # (T,), that of the loss
    weights: Weights | None = None,  # None: those of the batch
) -> Mapping[str, Stat]:
    """Compute the statistics behind the metrics of a loss."""
    weights = static_weights(batch, config) if weights is None else weights
    x = token_inputs(logprobs, entropy, batch, weights)
    evaluation = evaluate(x, batch.segments, config, entropy_gate)
    stats: dict[str, Stat] = {}
    if evaluation.kl is not None:
        stats["kl"] = mean_stat(evaluation.kl)
    if entropy is not None:
        stats["entropy"] = mean_stat(entropy)
        means, occupied = batch.segments.mean(entropy), batch.segments.lengths > 0
        for extreme in ("min", "max"):
            stats[f"entropy/sequence_{extreme}"] = extreme_stat(extreme, means, occupied)
    if entropy is not None and evaluation.entropy_gate is not None:
        gate = evaluation.entropy_gate.double()
        stats["entropy_top"] = Stat("mean", (entropy * gate).sum(), gate.sum())
    if config.entropy_coef != 0:
        stats["policy_loss"] = _policy_loss_stat(x, evaluation, batch, config)
    stats |= indicator_stats(
        config.surrogate.metrics(evaluation.terms),
        batch.segments,
        config.ratio_level.per_sequence and not batch.advantages_per_token,
    )
    stats |= _ratio_stats(evaluation.terms.ratio)
    stats["perplexity"] = replace(mean_stat(logprobs), kind="perplexity")
    if x.rollout_logprobs is not None:
        stats |= _rollout_stats(evaluation, x.rollout_logprobs)
    if evaluation.correction is not None:
        name = "sampling/importance_sampling_ratio"
        stats[f"{name}/min"] = extreme_stat("min", evaluation.correction)
        stats[f"{name}/mean"] = mean_stat(evaluation.correction)
        stats[f"{name}/max"] = extreme_stat("max", evaluation.correction)
    return stats


def _policy_loss_stat(
    x: TokenInputs, evaluation: Evaluation, batch: TokenBatch, config: LossConfig
) -> Stat:
    """Return the loss without its entropy bonus, as one sample per micro-batch."""
    total = (evaluation.loss * x.policy_weight).double().sum()
    if config.aggregation.per_micro_batch:
        total = total * batch.gradient_accumulation_steps
    return Stat("mean", total, torch.ones_like(total))


def _ratio_stats(ratio: Tensor) -> dict[str, Stat]:
    double = ratio.double()
    moments = torch.stack([double.sum(), (double * double).sum()])
    return {
        "ratio/min": extreme_stat("min", ratio),
        "ratio/max": extreme_stat("max", ratio),
        "ratio/ess": Stat("ess", moments, mean_stat(ratio).count),
    }


def _rollout_stats(evaluation: Evaluation, rollout_logprobs: Tensor) -> dict[str, Stat]:
    """Return statistics of the rollout engine's log-probabilities against the trainer's."""
    known = ~rollout_logprobs.isnan()
    difference = torch.where(known, evaluation.old_logprobs - rollout_logprobs, 0.0).double()
    count = known.double().sum()
    k3 = KL_ESTIMATORS["k3"](difference)
    sampled = torch.where(known, rollout_logprobs, 0.0).double().sum()
    return {
        "sampling/sampling_logp_difference/mean": Stat("mean", difference.abs().sum(), count),
        "sampling/sampling_logp_difference/max": extreme_stat("max", difference.abs(), known),
        "sampling/mismatch_kl_k1": Stat("mean", -difference.sum(), count),
        "sampling/mismatch_kl_k3": Stat("mean", k3.sum(), count),
        "sampling/rollout_perplexity": Stat("perplexity", sampled, count),
    }
