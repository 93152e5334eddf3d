"""Parts of losses: importance ratios, the top-entropy gate, KL, rollout corrections, aggregations.

An aggregation is ``sum_t w_t l_t`` with static weights ``w_t``, known before the forward. KL
estimators follow J. Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.batch import Segments, TokenBatch, host
from grpo_kernels.common import gather

# exp(20) is 5e8: far outside every trust region, far inside fp32
LOG_RATIO_LIMIT = 20.0
LARGEST_WEIGHT = math.exp(LOG_RATIO_LIMIT)


class Terms(NamedTuple):
    """The per-token quantities that losses are written in."""

    logprobs: Tensor  # (T,) lp, carries the gradient
    old_logprobs: Tensor  # (T,) lo, the denominator of the ratio
    delta: Tensor  # (T,) lp - lo, before the ratio map
    log_ratio: Tensor  # (T,) u = the ratio map of delta, clamped
    ratio: Tensor  # (T,) exp(u)
    advantages: Tensor  # (T,)
    rollout_weight: Tensor | None  # (T,) detached correction w, already bounded
    segments: Segments


class RatioLevel(NamedTuple):
    """A map of log-ratios, and a fact that schedules and metrics need."""

    map: Callable[[Tensor, Tensor, Segments], Tensor]  # (delta, logprobs, segments), all (T,)
    per_sequence: bool  # one value per sequence, so metrics average over sequences


def _sequence(delta: Tensor, logprobs: Tensor, segments: Segments) -> Tensor:
    return segments.expand(segments.mean(delta))


def _sequence_token(delta: Tensor, logprobs: Tensor, segments: Segments) -> Tensor:
    # the value of the sequence's ratio with the gradient of the token's log-probability
    return logprobs - logprobs.detach() + _sequence(delta, logprobs, segments).detach()


RATIO_LEVELS: dict[str, RatioLevel] = {
    "token": RatioLevel(lambda delta, *_: delta, False),  # PPO, arXiv:1707.06347
    "sequence": RatioLevel(_sequence, True),  # GSPO, arXiv:2507.18071
    "sequence_token": RatioLevel(_sequence_token, True),  # GSPO-token, from the same paper
}


def top_entropy_gate(entropy: Tensor, quantile: float, copies: int = 1) -> Tensor:
    """Return 1 where the entropy is in the top ``quantile`` over all processes; (T,) to (T,).

    "Beyond the 80/20 rule", arXiv:2506.01939. ``copies`` processes have the same tokens, for
    example if they share a vocabulary.
    """
    entropy = everyone = entropy.detach()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        counts = gather(torch.tensor(entropy.numel(), device=entropy.device), None).tolist()
        padded = gather(pad(entropy, (0, max(counts) - entropy.numel())), None)
        everyone = torch.cat([part[:count] for part, count in zip(padded, counts, strict=True)])
    if everyone.numel() == 0:
        return torch.zeros_like(entropy)
    ordered = everyone.sort().values[::copies]  # torch.quantile fails above 2**24 values
    position = (1 - quantile) * (ordered.numel() - 1)
    below = int(position)
    above = min(below + 1, ordered.numel() - 1)
    threshold = torch.lerp(ordered[below], ordered[above], position - below)
    return (entropy >= threshold).to(entropy.dtype)


# below _NEAR, this many terms of exp's series are exact in fp64
_NEAR, _TERMS = 0.5, 15


def _k3(x: Tensor) -> Tensor:
    # exp(x) - x - 1 cancels near 0; its series there is x^2 / 2 (1 + x / 3 (1 + ...))
    near = x.clamp(-_NEAR, _NEAR)
    series = torch.ones_like(x)
    for k in range(_TERMS, 2, -1):
        series = 1 + series * near * (1 / k)
    # beyond the limit exp continues as its tangent: finite, with a gradient that pulls back
    exp = x.clamp(max=LOG_RATIO_LIMIT).exp() * (1 + (x - LOG_RATIO_LIMIT).clamp(min=0))
    return torch.where(x.abs() < _NEAR, 0.5 * near * near * series, exp - x - 1)


# functions of x = lr - lp
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: -x,
    "k2": lambda x: 0.5 * x * x,
    "k3": _k3,
    "abs": torch.abs,
}


class CorrectionMode(NamedTuple):
    """A way to turn log-ratios ``e = lo - ls`` into bounded weights of tokens or sequences.

    The bounds apply to ``exp(e)`` or to an estimate of the KL divergence, per token or reduced over
    the sequence.
    """

    reduce: str | None = None  # a method of Segments; None: per token
    estimate: Callable[[Tensor], Tensor] | None = None  # of the divergence; None: e itself
    bounds_exp: bool = True  # the bounds apply to exp of it, so they bound a ratio
    truncate: bool = False  # clamp to the bounds; False: zero outside the bounds
    weighs: bool = True  # weight by the ratio inside the bounds; False: by 1

    @property
    def per_sequence(self) -> bool:
        return self.reduce is not None

    def weight(
        self,
        log_ratio: Tensor,
        segments: Segments,
        low: float | None,
        high: float | None,
    ) -> Tensor:
        """Return the weights of (T,) log-ratios, (T,) or (B,)."""
        value = log_ratio if self.estimate is None else self.estimate(log_ratio)
        if self.reduce is not None:
            value = getattr(segments, self.reduce)(value)
        if self.bounds_exp:
            value = value.exp()
        # without an upper bound, clamp to a finite number: infinity times 0 is NaN
        if self.truncate:
            return value.clamp(min=low, max=LARGEST_WEIGHT if high is None else high)
        outside = value != value.clamp(0.0 if low is None else low, high)
        if not self.weighs:
            value = torch.ones_like(value)
        elif self.reduce == "mean":  # bounds on the geometric mean, but the sequence's whole ratio
            value = segments.sum(log_ratio).exp()
        return value.clamp(max=LARGEST_WEIGHT).masked_fill(outside, 0.0)


# truncated and masked importance sampling, and rejection: verl's rollout_is and rollout_rs, from
# "When Speed Kills Stability" (richardli.xyz/rl-collapse). As in verl, the bounds of k1 apply to
# exp(k1) = exp(-e), the inverse of the weighting ratio.
CORRECTION_MODES: dict[str, CorrectionMode] = {
    "token_truncate": CorrectionMode(truncate=True),
    "token_mask": CorrectionMode(),
    "sequence_truncate": CorrectionMode("sum", truncate=True),
    "sequence_mask": CorrectionMode("sum"),
    "geometric_mask": CorrectionMode("mean"),
    **{
        f"{level}_{name}": CorrectionMode(
            reduce, KL_ESTIMATORS[name], bounds_exp=name == "k1", weighs=False
        )
        for level, reduce in {
            "token": None,
            "sequence_sum": "sum",
            "sequence_mean": "mean",
            "sequence_max": "max",
        }.items()
        for name in ("k1", "k2", "k3")
        if (level, name) != ("sequence_max", "k1")
    },
}


class Counted(NamedTuple):
    """The divisors of means, in this micro-batch and per rank."""

    sequences: Tensor | float
    tokens: float
    tokens_of: Tensor | None = None  # (T,) fp64, 1 for tokens that count; None: all count

    @classmethod
    def of(cls, batch: TokenBatch, with_zero_variance: bool) -> Counted:
        """Count all sequences of a batch, or only those with an advantage."""
        segments = batch.segments
        ranks = batch.num_ranks
        sequences = partial(_divisor, batch.num_sequences_in_micro_batch)
        if with_zero_variance:
            return cls(sequences(batch.num_sequences / ranks), segments.num_tokens / ranks)
        lengths, active = host.values(batch.whole_counts)  # known, as checked at the API edge
        kept = [length for length, few in zip(lengths, active, strict=True) if few]
        advantages = segments.sum((batch.advantages != 0).double())
        tokens_of = segments.expand((advantages > 0).double())
        return cls(sequences(len(kept) / ranks), sum(kept) / ranks, tokens_of)


class Aggregation(NamedTuple):
    """How per-token losses become one number."""

    # (batch, counts, constant length) -> (T,), () or a number
    weight: Callable[[TokenBatch, Counted, Any], Tensor | float]
    # divide by the gradient accumulation steps; False: the counts span them already
    per_micro_batch: bool = True
    divides_by_max_length: bool = False
    by_sequence: bool = False  # reduces each sequence first; False: all tokens count the same
    counts_tokens: bool = False  # divides by a number of tokens, which the caller may give
    by_prompt: bool = False  # needs the number of tokens of each sequence's prompt


def _sequence_mean(batch: TokenBatch, counted: Counted, max_length: int | None) -> Tensor:
    lengths = batch.segments.lengths.clamp(min=1).double()
    return batch.segments.expand((lengths * counted.sequences).reciprocal())


def token_mean(
    batch: TokenBatch, counted: Counted, max_length: int | None = None
) -> Tensor | float:
    """Return the weight of a token in a mean over a micro-batch."""
    return _inverse(batch.num_tokens_in_micro_batch, counted.tokens)


def _window_token_mean(
    batch: TokenBatch, counted: Counted, max_length: int | None
) -> Tensor | float:
    tokens = counted.tokens * batch.gradient_accumulation_steps
    return _inverse(batch.num_items_in_batch, tokens)


def _prompt_mean(batch: TokenBatch, counted: Counted, max_length: int | None) -> Tensor:
    # a mean over each prompt's tokens, then over prompts: ScaleRL, arXiv:2510.13786, section 3.2
    assert batch.prompt_tokens is not None  # checked at the API edge
    share = batch.segments.expand(batch.prompt_tokens.clamp(min=1).reciprocal())
    counts = share if counted.tokens_of is None else share * counted.tokens_of
    prompts = batch.segments.sum_all(counts) / batch.num_ranks * batch.gradient_accumulation_steps
    return share * _inverse(batch.num_prompts, prompts)


def _divisor(count: Tensor | None, otherwise: Tensor | float) -> Tensor | float:
    """Return the count, or 1 for a count of 0; a tensor only for a count on a device."""
    divisor = otherwise if count is None else host.number(count)
    # 0 only if no process has a token; fractions are shares of processes or steps
    if isinstance(divisor, Tensor):
        return torch.where(divisor > 0, divisor.double(), 1.0)
    return divisor if divisor > 0 else 1.0


def _inverse(count: Tensor | None, otherwise: Tensor | float) -> Tensor | float:
    divisor = _divisor(count, otherwise)
    return divisor.reciprocal() if isinstance(divisor, Tensor) else 1.0 / divisor


AGGREGATIONS: dict[str, Aggregation] = {
    "sequence_mean": Aggregation(_sequence_mean, by_sequence=True),
    "sequence_sum": Aggregation(
        lambda batch, counted, _: 1.0 / counted.sequences, by_sequence=True
    ),
    "token_mean": Aggregation(token_mean, counts_tokens=True),
    "fixed_length": Aggregation(
        lambda batch, counted, length: 1.0 / (counted.sequences * length),
        divides_by_max_length=True,
    ),
    "window_token_mean": Aggregation(_window_token_mean, per_micro_batch=False, counts_tokens=True),
    "prompt_mean": Aggregation(_prompt_mean, per_micro_batch=False, by_prompt=True),
}
