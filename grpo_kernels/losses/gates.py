"""Trust regions by probabilities: tokens and sequences that moved too far get no gradient.

Each is ``-M sg(r) A log pi``. ``r`` is the ratio of the policy to the reference of the trust
region, by default the rollout engine (``bypass_mode``); the gate ``M`` is 1 for tokens that are
kept.
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

# lower bound of 1 - p, so that its logarithm is finite: engines' log-probabilities resolve no less
_LEAST = 1e-8


def _complement(logprobs: Tensor) -> Tensor:
    """Return 1 - p, accurate also if p is near 1."""
    return (-torch.expm1(logprobs)).clamp(min=_LEAST)


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return D(p || q) of "this token or another" from (T,) log-probabilities; always finite."""
    p, q = p.clamp(min=-80.0), q.clamp(min=-80.0)
    rest, other = _complement(p), _complement(q)
    return p.exp() * (p - q) + rest * (rest.log() - other.log())


def moved(terms: Terms) -> Tensor:
    """Return how much the probability of each token rose, (T,), detached."""
    return terms.logprobs.detach().exp() - terms.old_logprobs.exp()


class Gated(Surrogate):
    """Base class of trust regions. Subclasses define :meth:`keep`, and may add a penalty."""

    needs_token_ratios = True

    def keep(self, terms: Terms) -> Tensor:
        """Return which tokens get a gradient, (T,) bool."""
        raise NotImplementedError

    def weight(self, terms: Terms) -> Tensor:
        """Return the weights of kept tokens, (T,), detached."""
        return terms.ratio.detach()

    @property
    def tau(self) -> float:
        """Coefficient of a penalty ``log(r)^2`` on all tokens, kept or not (arXiv:2602.02276)."""
        return 0.0

    @property
    def vanishes_at_zero_advantage(self) -> bool:  # type: ignore[override]
        """Whether zero advantage means zero loss and gradient, which a penalty rules out."""
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
    """Drop tokens that moved too far in the direction of their advantage (DPPO, arXiv:2602.04879).

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

    With ``dppo_tau=1e-3`` and no bound on the weight it is prime-rl's default loss.

    Args:
        dppo_tv_low: how far the probability of a token with negative advantage may fall.
        dppo_tv_high: how far the probability of a token with positive advantage may rise.
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
        dppo_kl_low: bound for tokens with negative advantage that fell, in nats.
        dppo_kl_high: bound for tokens with positive advantage that rose, in nats.
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
    """Drop tokens with a probability that moved too far either way (prime-rl's loss type ``ipo``).

    Args:
        ipo_threshold: how far a probability may move.
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
    """Drop tokens with a ratio outside a range (IcePop, arXiv:2510.18855).

    Args:
        icepop_low: lowest ratio that is kept (INTELLECT-3, arXiv:2512.16144).
        icepop_high: highest ratio that is kept.
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
        kpop_threshold: largest divergence that is kept, in nats.
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
        trm_threshold: largest binary KL divergence of a token, in nats; required.
    """

    scope = "sequence"

    trm_threshold: float | None = number(None, *POSITIVE)

    def keep(self, terms: Terms) -> Tensor:
        assert self.trm_threshold is not None  # checked on construction
        divergence = binary_kl(terms.old_logprobs, terms.logprobs.detach())
        return terms.segments.expand(terms.segments.max(divergence)) <= self.trm_threshold


@dataclass(frozen=True, kw_only=True)
class Vaco(Gated):
    """In sequences that moved too far on average, drop updates further away (arXiv:2603.01365).

    Args:
        vaco_threshold: largest mean of ``|r - 1| / 2`` over a sequence, an estimate of the total
            variation; required.
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
    """Drop tokens that exceed what their sequence may still move (CPPO, arXiv:2606.10968, binary
    TV).

    Early tokens count more. If the tokens before a token have moved by more than a budget, the
    excess is subtracted from its own bound.

    Args:
        cppo_delta: how far a probability may move in the direction of its advantage.
        cppo_w_min: weight of a sequence's last token; the first one has weight 1.
        cppo_delta_b: the budget per preceding token. It follows the 0.9 quantile of the sequence's
            movements, from this value up to twice it (equation 22).
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
