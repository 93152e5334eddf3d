"""What a surrogate sees of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

SCOPES = ("token", "sequence", "batch")  # how far a token's gradient reaches, narrow to wide


class Segments(NamedTuple):
    """Reductions over sequences; token-scope code never calls them."""

    sum: Callable[[Tensor], Tensor]  # (T,) -> (B,)
    mean: Callable[[Tensor], Tensor]  # (T,) -> (B,), 0 for an empty sequence
    expand: Callable[[Tensor], Tensor]  # (B,) -> (T,)


class Terms(NamedTuple):
    """The per-token quantities that losses are written in."""

    logprobs: Tensor  # (T,) lp, carries the gradient
    delta: Tensor  # (T,) lp - lo, before the ratio map
    log_ratio: Tensor  # (T,) u = the ratio map of delta, clamped
    ratio: Tensor  # (T,) exp(u)
    advantages: Tensor  # (T,)
    rollout_weight: Tensor | None  # (T,) detached correction w, already bounded
    segments: Segments


def widest(*scopes: str) -> str:
    """The widest of the given scopes."""
    return max(scopes, key=SCOPES.index)
