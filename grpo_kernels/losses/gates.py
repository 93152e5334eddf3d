"""Trust regions by probabilities: tokens and sequences that moved too far get no gradient.

Each is ``-M sg(r) A log pi``, with the ratio ``r`` of the policy and the one that it is held to, by
default the rollout engine's (``bypass_mode``), and a gate ``M``: 1 where a token is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.common import NOT_NEGATIVE, POSITIVE, number
from grpo_kernels.losses.metrics import Indicators
from grpo_kernels.losses.surrogates import Surrogate, clip_shares
from grpo_kernels.losses.terms import Terms

# of 1 - p, so that its logarithm is finite: log-probabilities of engines tell no smaller one
_LEAST = 1e-8


def _complement(logprobs: Tensor) -> Tensor:
    """Return 1 - p, with its digits where p is near 1."""
    return (-torch.expm1(logprobs)).clamp(min=_LEAST)


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return D(p || q) of "this token or another", by (T,) log-probabilities; always finite."""
    p, q = p.clamp(min=-80.0), q.clamp(min=-80.0)
    rest, other = _complement(p), _complement(q)
    return p.exp() * (p - q) + rest * (rest.log() - other.log())


def moved(terms: Terms) -> Tensor:
    """Return by how much the probability of each token rose, (T,), detached."""
    return terms.logprobs.detach().exp() - terms.old_logprobs.exp()


class Gated(Surrogate):
    """Base class of trust regions. Subclasses define :meth:`keep`, and may have a penalty."""

    needs_token_ratios = True

    def keep(self, terms: Terms) -> Tensor:
        """Return which tokens have a gradient, (T,) bool."""
        raise NotImplementedError

    def weight(self, terms: Terms) -> Tensor:
        """Return the weight of a token that is kept, (T,), detached."""
        return terms.ratio.detach()

    @property
    def tau(self) -> float:
        """The coefficient of ``log(r)^2`` of every token, kept or not (arXiv:2602.02276)."""
        return 0.0

    @property
    def vanishes_at_zero_advantage(self) -> bool:  # type: ignore[override]
        """Whether zero advantage means zero loss and gradient: without a penalty."""
        return self.tau == 0

    def __call__(self, terms: Terms) -> Tensor:
        weight = self.weight(terms).masked_fill(~self.keep(terms), 0.0)
        loss = -weight * terms.advantages * terms.logprobs
        return loss if self.tau == 0 else loss + self.tau * terms.delta * terms.delta

    def metrics(self, terms: Terms) -> Indicators:
        dropped = ~self.keep(terms)
        return clip_shares(dropped & (terms.advantages < 0), dropped & (terms.advantages > 0))


@dataclass(frozen=True, kw_only=True)
class Dppo(Gated):
    """Drop tokens that moved too far with their advantage (DPPO, arXiv:2602.04879).

    Args:
        dppo_ratio_max: upper bound of the weight.
        dppo_tau: coefficient of a penalty ``log(r)^2`` on all tokens (prime-rl: 1e-3).
    """

    dppo_ratio_max: float = number(20.0, *POSITIVE)
    dppo_tau: float = number(0.0, *NOT_NEGATIVE)

    @property
    def tau(self) -> float:
        return self.dppo_tau

    def weight(self, terms: Terms) -> Tensor:
        return terms.ratio.detach().clamp(max=self.dppo_ratio_max)


@dataclass(frozen=True, kw_only=True)
class DppoTv(Dppo):
    """DPPO by the total variation of "this token or another" (arXiv:2602.04879, equation 13).

    With ``dppo_tau=1e-3`` and without a bound of the weight it is prime-rl's default loss.

    Args:
        dppo_tv_low: by how much the probability of a token of negative advantage may fall.
        dppo_tv_high: by how much that of one of positive advantage may rise.
    """

    dppo_tv_low: float = number(0.2, *NOT_NEGATIVE)
    dppo_tv_high: float = number(0.2, *NOT_NEGATIVE)

    def keep(self, terms: Terms) -> Tensor:
        rise = moved(terms)
        low, high = rise >= -self.dppo_tv_low, rise <= self.dppo_tv_high
        return torch.where(terms.advantages > 0, high, low)


@dataclass(frozen=True, kw_only=True)
class DppoKl(Dppo):
    """DPPO by the KL divergence of "this token or another" (arXiv:2602.04879, equation 14).

    Args:
        dppo_kl_low: bound for tokens of negative advantage that fell, in nats.
        dppo_kl_high: bound for tokens of positive advantage that rose, in nats.
    """

    dppo_kl_low: float = number(0.05, *NOT_NEGATIVE)
    dppo_kl_high: float = number(0.05, *NOT_NEGATIVE)

    def keep(self, terms: Terms) -> Tensor:
        rise = terms.delta.detach()
        divergence = binary_kl(terms.old_logprobs, terms.logprobs.detach())
        low = (divergence <= self.dppo_kl_low) | (rise >= 0)
        high = (divergence <= self.dppo_kl_high) | (rise <= 0)
        return torch.where(terms.advantages > 0, high, low)


@dataclass(frozen=True, kw_only=True)
class Ipo(Gated):
    """Drop tokens whose probability moved too far either way (prime-rl's loss of type ``ipo``).

    Args:
        ipo_threshold: by how much a probability may move.
        ipo_tau: coefficient of a penalty ``log(r)^2`` on all tokens.
    """

    ipo_threshold: float = number(0.1, *NOT_NEGATIVE)
    ipo_tau: float = number(1e-3, *NOT_NEGATIVE)

    @property
    def tau(self) -> float:
        return self.ipo_tau

    def keep(self, terms: Terms) -> Tensor:
        return moved(terms).abs() <= self.ipo_threshold


@dataclass(frozen=True, kw_only=True)
class IcePop(Gated):
    """Drop tokens whose ratio is outside of a range (IcePop, arXiv:2510.18855).

    Args:
        icepop_low: the lowest ratio that is kept (INTELLECT-3, arXiv:2512.16144).
        icepop_high: the highest.
    """

    icepop_low: float = number(0.2, "a number in (0, 1]", lambda x: 0 < x <= 1)
    icepop_high: float = number(5.0, "a number >= 1", lambda x: x >= 1)

    def keep(self, terms: Terms) -> Tensor:
        low, high = math.log(self.icepop_low), math.log(self.icepop_high)
        log_ratio = terms.delta.detach()
        return (log_ratio >= low) & (log_ratio <= high)


@dataclass(frozen=True, kw_only=True)
class KPop(Gated):
    """Drop tokens by the binary KL divergence in both directions (ringtech.notion.site/kpop).

    Args:
        kpop_threshold: the largest divergence that is kept, in nats.
    """

    kpop_threshold: float = number(0.1, *NOT_NEGATIVE)

    def keep(self, terms: Terms) -> Tensor:
        policy, old = terms.logprobs.detach(), terms.old_logprobs
        there, back = binary_kl(policy, old), binary_kl(old, policy)
        return torch.maximum(there, back) <= self.kpop_threshold


@dataclass(frozen=True, kw_only=True)
class Trm(Gated):
    """Drop sequences with a token that moved too far (Trust Region Masking, arXiv:2512.23075).

    Args:
        trm_threshold: the largest binary KL divergence of a token, in nats; has to be given.
    """

    scope = "sequence"

    trm_threshold: float | None = number(None, *POSITIVE)

    def keep(self, terms: Terms) -> Tensor:
        assert self.trm_threshold is not None  # checked on construction
        divergence = binary_kl(terms.old_logprobs, terms.logprobs.detach())
        return terms.segments.expand(terms.segments.max(divergence)) <= self.trm_threshold


@dataclass(frozen=True, kw_only=True)
class Vaco(Gated):
    """Drop what would move a sequence further that moved too far on average (arXiv:2603.01365).

    Args:
        vaco_threshold: the largest mean of ``|r - 1| / 2`` over a sequence, which estimates the
            total variation; has to be given.
    """

    scope = "sequence"

    vaco_threshold: float | None = number(None, *POSITIVE)

    def keep(self, terms: Terms) -> Tensor:
        assert self.vaco_threshold is not None  # checked on construction
        variation = terms.segments.mean((terms.ratio.detach() - 1).abs() / 2)
        near = terms.segments.expand(variation) <= self.vaco_threshold
        return near | (terms.advantages * terms.delta.detach() <= 0)


@dataclass(frozen=True, kw_only=True)
class Cppo(Gated):
    """Drop tokens by what their sequence has left to move (CPPO, arXiv:2606.10968, binary TV).

    Early tokens count more, and what the tokens before one moved beyond the budget is taken from
    its own bound.

    Args:
        cppo_delta: by how much a probability may move with its advantage.
        cppo_w_min: weight of a sequence's last token; that of the first is 1.
        cppo_delta_b: the budget per token before, if nine tenths of the sequence moved less; it
            follows them up to twice that (equation 22).
    """

    scope = "prefix"

    cppo_delta: float = number(0.2, *NOT_NEGATIVE)
    cppo_w_min: float = number(0.8, "a number in (0, 1]", lambda x: 0 < x <= 1)
    cppo_delta_b: float = number(0.02, *NOT_NEGATIVE)

    def keep(self, terms: Terms) -> Tensor:
        segments = terms.segments
        distance = moved(terms).abs().double()
        before = segments.places.double()
        slope = (1 - self.cppo_w_min) / segments.expand(segments.lengths - 1).clamp(min=1)
        weighted = (1 - slope * before) * distance  # equations 8 to 10
        spent = segments.running_sum(weighted) - weighted
        weight_before = before - slope * before * (before - 1) / 2
        budget = segments.quantile(distance, 0.9).clamp(self.cppo_delta_b, 2 * self.cppo_delta_b)
        left = self.cppo_delta + segments.expand(budget) * weight_before - spent
        inside = weighted <= left.clamp(max=self.cppo_delta)
        return inside | (terms.advantages * terms.delta.detach() <= 0)
