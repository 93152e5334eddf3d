"""Importance ratios: from log-probabilities to what a surrogate sees of a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from grpo_kernels.batch import Segments

SCOPES = ("token", "sequence", "batch")  # how far a token's gradient reaches, narrow to wide
# exp(20) is 5e8: far outside every trust region, far inside fp32. One clamp here keeps every loss
# and gradient finite.
LOG_RATIO_LIMIT = 20.0


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
    """Apply the level's map and the one clamp."""
    return level.map(delta, logprobs, segments).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def max_local_vocab(*scopes: str) -> str:
    """Return the max_local_vocab of the given scopes."""
    return max(scopes, key=SCOPES.index)
