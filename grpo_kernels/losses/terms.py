"""The parts that losses are made of, each a function of (T,) vectors: importance ratios, gates, KL
penalties and aggregations.

An aggregation is ``sum_t w_t l_t`` with static weights ``w_t``, known before the forward. KL
estimators as in J. Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.batch import Segments, TokenBatch, host
from grpo_kernels.ranks import gather

SCOPES = ("token", "sequence", "batch")  # how far a token's gradient reaches, narrow to wide
# exp(20) is 5e8: far outside every trust region, far inside fp32. One clamp here keeps every loss
# and gradient finite.
LOG_RATIO_LIMIT = 20.0
_LARGEST_WEIGHT = math.exp(LOG_RATIO_LIMIT)


class Terms(NamedTuple):
    """The per-token quantities that losses are written in."""

    logprobs: Tensor  # (T,) lp, carries the gradient
    delta: Tensor  # (T,) lp - lo, before the ratio map
    log_ratio: Tensor  # (T,) u = the ratio map of delta, clamped
    ratio: Tensor  # (T,) exp(u)
    advantages: Tensor  # (T,)
    rollout_weight: Tensor | None  # (T,) detached correction w, already bounded
    segments: Segments


@dataclass(frozen=True)
class RatioLevel:
    """A map of log-ratios with what the schedules and metrics need to know of it."""

    map: Callable[[Tensor, Tensor, Segments], Tensor]  # (delta, logprobs, segments), all (T,)
    scope: str
    per_sequence: bool  # one value per sequence, so metrics average over sequences
    source: str


def _sequence(delta: Tensor, logprobs: Tensor, segments: Segments) -> Tensor:
    return segments.expand(segments.mean(delta))


def _sequence_token(delta: Tensor, logprobs: Tensor, segments: Segments) -> Tensor:
    # the value of the sequence's ratio, the gradient of the token's own log-probability
    return logprobs - logprobs.detach() + _sequence(delta, logprobs, segments).detach()


RATIO_LEVELS: dict[str, RatioLevel] = {
    "token": RatioLevel(lambda delta, *_: delta, "token", False, "PPO, arXiv:1707.06347"),
    "sequence": RatioLevel(_sequence, "sequence", True, "GSPO, arXiv:2507.18071"),
    "sequence_token": RatioLevel(_sequence_token, "sequence", True, "GSPO-token, arXiv:2507.18071"),
}


def max_local_vocab(*scopes: str) -> str:
    """Return the max_local_vocab of the given scopes."""
    return max(scopes, key=SCOPES.index)


class CorrectionMode(NamedTuple):
    """One way to turn ``exp(lo - ls)`` into a bounded weight."""

    per_sequence: bool
    truncate: bool  # clamp to the bounds; otherwise zero outside of them


CORRECTION_MODES: dict[str, CorrectionMode] = {
    "token_truncate": CorrectionMode(per_sequence=False, truncate=True),
    "token_mask": CorrectionMode(per_sequence=False, truncate=False),
    "sequence_truncate": CorrectionMode(per_sequence=True, truncate=True),
    "sequence_mask": CorrectionMode(per_sequence=True, truncate=False),
}


def rollout_correction(
    old_logprobs: Tensor,  # (T,)
    rollout_logprobs: Tensor,  # (T,), NaN where the engine does not know: nothing is corrected
    mode: CorrectionMode,
    low: float | None,
    high: float | None,
    segments: Segments,
) -> Tensor:
    """Return the importance weight against the rollout engine: (T,), or (B,) per sequence.

    Without an upper bound it ends at ``exp(LOG_RATIO_LIMIT)``: an infinite one times 0 is NaN.
    """
    log_ratio = (old_logprobs - rollout_logprobs).nan_to_num(nan=0.0).detach()
    weight = (segments.sum(log_ratio) if mode.per_sequence else log_ratio).exp()
    if mode.truncate:
        return weight.clamp(min=low, max=_LARGEST_WEIGHT if high is None else high)
    outside = weight < (0.0 if low is None else low)
    if high is not None:
        outside = outside | (weight > high)
    return weight.clamp(max=_LARGEST_WEIGHT).masked_fill(outside, 0.0)


def off_policy_gate(
    logprobs: Tensor,  # (T,)
    sampling_logprobs: Tensor,  # (T,) of the rollout engine, or else the old ones; NaN: unknown
    advantages: Tensor,  # (T,)
    threshold: float,
    segments: Segments,
) -> Tensor:
    """Return 1 where ``A >= 0`` or the sequence drifted at most ``threshold`` nats, else 0.

    Off-policy sequence masking of DeepSeek-V3.2, arXiv:2512.02556. Returns (T,).
    """
    drift = (sampling_logprobs - logprobs.detach()).nan_to_num(nan=0.0)
    near = segments.expand(segments.mean(drift)) <= threshold
    return ((advantages >= 0) | near).to(logprobs.dtype)


def top_entropy_gate(entropy: Tensor, quantile: float, copies: int = 1) -> Tensor:
    """Return 1 where the entropy is in the top ``quantile`` of all processes; (T,) to (T,).

    "Beyond the 80/20 rule", arXiv:2506.01939. The threshold is the linearly interpolated quantile,
    found by sorting: ``torch.quantile`` refuses more than 2**24 values. ``copies`` processes have
    the same tokens, as those that share a vocabulary do.
    """
    entropy = entropy.detach()
    everyone = _gather_values(entropy)
    if everyone.numel() == 0:
        return torch.zeros_like(entropy)
    ordered = everyone.sort().values[::copies]
    position = (1 - quantile) * (ordered.numel() - 1)
    below = int(position)
    above = min(below + 1, ordered.numel() - 1)
    threshold = torch.lerp(ordered[below], ordered[above], position - below)
    return (entropy >= threshold).to(entropy.dtype)


def _gather_values(values: Tensor) -> Tensor:
    """Return all processes' values, concatenated; sizes may differ."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return values
    counts = gather(torch.tensor(values.numel(), device=values.device), None).tolist()
    everyone = gather(pad(values, (0, max(counts) - values.numel())), None)
    return torch.cat([part[:count] for part, count in zip(everyone, counts, strict=True)])


# up to here so many terms of exp's series are exact in fp64
_NEAR, _TERMS = 0.5, 15


def _k3(x: Tensor) -> Tensor:
    # beyond the limit exp goes on as its tangent: finite, and with a gradient that pulls back
    exp = x.clamp(max=LOG_RATIO_LIMIT).exp() * (1 + (x - LOG_RATIO_LIMIT).clamp(min=0))
    return torch.where(x.abs() < _NEAR, _near_k3(x.clamp(-_NEAR, _NEAR)), exp - x - 1)


def _near_k3(x: Tensor) -> Tensor:
    """Return exp(x) - x - 1, which cancels near 0, by its series: x^2 / 2 (1 + x / 3 (1 + ...))."""
    series = torch.ones_like(x)
    for k in range(_TERMS, 2, -1):
        series = 1 + series * x * (1 / k)
    return 0.5 * x * x * series


# each takes x = lr - lp
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: -x,
    "k2": lambda x: 0.5 * x * x,
    "k3": _k3,
    "abs": torch.abs,
}


@dataclass(frozen=True)
class Aggregation:
    """How per-token losses become one number."""

    # of a batch, and the constant length: (T,), () or a number
    weight: Callable[[TokenBatch, int | None], Tensor | float]
    # divided by the gradient accumulation steps here; otherwise num_items_in_batch spans them
    per_micro_batch: bool = True
    divides_by_max_length: bool = False
    by_sequence: bool = False  # it reduces each sequence first; else all tokens are alike


def _sequences(batch: TokenBatch) -> float:
    return batch.sequences_per_rank or 1


def _sequence_mean(batch: TokenBatch, max_length: int | None) -> Tensor:
    lengths = batch.segments.lengths.clamp(min=1).double()
    return batch.segments.expand((lengths * _sequences(batch)).reciprocal())


def _fixed_length(batch: TokenBatch, max_length: int | None) -> float:
    assert max_length is not None  # LossConfig checked it
    return 1.0 / (_sequences(batch) * max_length)


def _window_token_mean(batch: TokenBatch, max_length: int | None) -> Tensor | float:
    items = batch.num_items_in_batch
    if items is None:
        return inverse(batch.tokens_per_rank * batch.gradient_accumulation_steps)
    return inverse(items)


def tokens_in_micro_batch(batch: TokenBatch) -> Tensor | float:
    """Return what the means over a micro-batch divide by."""
    given = batch.num_tokens_in_micro_batch
    return batch.tokens_per_rank if given is None else given


def inverse(count: Tensor | float) -> Tensor | float:
    """Return ``1 / count``, or 1 for a count of 0: a tensor only where it is on a device."""
    if isinstance(count, Tensor):
        if not host.reading_is_free(count):
            # 0 only when no process has a token; a fraction is a share of processes or steps
            return torch.where(count > 0, count.double(), 1.0).reciprocal()
        count = host.values(count)
    return 1.0 / count if count > 0 else 1.0


AGGREGATIONS: dict[str, Aggregation] = {
    "sequence_mean": Aggregation(_sequence_mean, by_sequence=True),
    "sequence_sum": Aggregation(lambda batch, _: 1.0 / _sequences(batch), by_sequence=True),
    "token_mean": Aggregation(lambda batch, _: inverse(tokens_in_micro_batch(batch))),
    "fixed_length": Aggregation(_fixed_length, divides_by_max_length=True),
    "window_token_mean": Aggregation(_window_token_mean, per_micro_batch=False),
}
