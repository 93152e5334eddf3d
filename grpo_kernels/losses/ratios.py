"""Ratio maps: how per-token log-ratios become the log-ratio that a surrogate sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from grpo_kernels.losses.terms import Segments

# exp(20) is 5e8: far outside every trust region, far inside fp32. One clamp here keeps every loss
# and gradient finite.
LOG_RATIO_LIMIT = 20.0


class RatioMap(Protocol):
    """``(delta, logprobs, segments) -> log_ratio``, all (T,)."""

    def __call__(self, delta: Tensor, logprobs: Tensor, segments: Segments) -> Tensor: ...


@dataclass(frozen=True)
class RatioLevel:
    """A ratio map with what the schedules and metrics need to know of it."""

    map: RatioMap
    scope: str
    per_sequence: bool  # one value per sequence, so metrics average over sequences
    source: str


def _token(delta: Tensor, logprobs: Tensor, segments: Segments) -> Tensor:
    return delta


def _sequence(delta: Tensor, logprobs: Tensor, segments: Segments) -> Tensor:
    return segments.expand(segments.mean(delta))


def _sequence_token(delta: Tensor, logprobs: Tensor, segments: Segments) -> Tensor:
    # the value of the sequence's ratio, the gradient of the token's own log-probability
    return logprobs - logprobs.detach() + _sequence(delta, logprobs, segments).detach()


RATIO_LEVELS: dict[str, RatioLevel] = {
    "token": RatioLevel(_token, "token", False, "PPO, arXiv:1707.06347"),
    "sequence": RatioLevel(_sequence, "sequence", True, "GSPO, arXiv:2507.18071"),
    "sequence_token": RatioLevel(_sequence_token, "sequence", True, "GSPO-token, arXiv:2507.18071"),
}


def log_ratio(level: RatioLevel, delta: Tensor, logprobs: Tensor, segments: Segments) -> Tensor:
    """Applies the level's map and the one clamp."""
    return level.map(delta, logprobs, segments).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
