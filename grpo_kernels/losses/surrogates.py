"""Surrogates: per-token policy objectives, each a small class with its settings.

A surrogate is a torch expression of :class:`Terms`; autograd derives its gradient. At ratio 1 the
gradient is ``-advantage`` per token, unless the paper says otherwise.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_kernels.common import NOT_NEGATIVE, POSITIVE, check_fields, choice, number
from grpo_kernels.losses.metrics import Indicators
from grpo_kernels.losses.terms import Terms


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """Base class of surrogates: frozen dataclasses with the settings as fields.

    Subclasses define :meth:`__call__`, and may define :meth:`metrics` and ``__post_init__``.
    """

    scope: ClassVar[str] = "token"
    # zero advantage means zero loss and gradient, so such rows need no backward
    vanishes_at_zero_advantage: ClassVar[bool] = True
    # the surrogate applies the rollout correction itself; it is not multiplied again
    uses_rollout_weight: ClassVar[bool] = False
    # it computes sequence ratios itself, so importance_sampling_level must be "token"
    needs_token_ratios: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, terms: Terms) -> Tensor:
        """Return the per-token loss (T,)."""
        raise NotImplementedError

    def metrics(self, terms: Terms) -> Indicators:
        """Return metrics to log: name to (kind, per-token or per-sequence values)."""
        return {}


def by_sign(positive: Tensor, if_positive: float, otherwise: float, like: Tensor) -> Tensor:
    a, b = torch.full_like(like, if_positive), torch.full_like(like, otherwise)
    return torch.where(positive, a, b)


def _larger(a: Tensor, b: Tensor) -> Tensor:
    """Return the maximum; on ties ``a`` gets the whole gradient, which costs fewer operations."""
    return torch.where(a >= b, a, b)


def _sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid; its derivative s (1 - s) stays accurate where it is near 1."""
    least = torch.sigmoid(torch.where(x > 0, -x, x))  # the smaller of s and 1 - s
    return torch.where(x > 0, 1 - least, least)


def _clipped(ratio: Tensor, least: float, most: float, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens are clipped from below, and which from above."""
    return (ratio < least) & (advantages < 0), (ratio > most) & (advantages > 0)


def clip_shares(low: Tensor, high: Tensor) -> Indicators:
    """Return metrics of the clipped (T,) tokens, with negative and with positive advantage."""
    return {
        "clip_ratio/low_mean": ("mean", low),
        "clip_ratio/low_min": ("sequence_min", low),
        "clip_ratio/high_mean": ("mean", high),
        "clip_ratio/high_max": ("sequence_max", high),
        "clip_ratio/region_mean": ("mean", low | high),
    }


@dataclass(frozen=True, kw_only=True)
class ClipRange(Surrogate):
    """Base class of surrogates that treat tokens differently outside a range of ratios around 1.

    Args:
        epsilon: lower clip distance: the ratio is clipped to ``1 - epsilon``; 1 or more: no lower
            bound.
        epsilon_high: upper clip distance (DAPO, arXiv:2503.14476); None: ``epsilon``.
    """

    epsilon: float = number(0.2, *NOT_NEGATIVE)
    epsilon_high: float | None = number(None, *NOT_NEGATIVE, optional=True)

    @property
    def highest(self) -> float:
        """The upper bound of the ratio."""
        return 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    def clipped(self, terms: Terms) -> tuple[Tensor, Tensor]:
        """Return which tokens are below the range, and which are above it; detached."""
        return _clipped(terms.ratio.detach(), 1 - self.epsilon, self.highest, terms.advantages)

    def metrics(self, terms: Terms) -> Indicators:
        return clip_shares(*self.clipped(terms))


@dataclass(frozen=True, kw_only=True)
class Clip(ClipRange):
    """PPO's clipped ratio (arXiv:1707.06347), with bounds that later papers added.

    Args:
        delta: cap of the unclipped ratio (INTELLECT-2, arXiv:2505.07291); None: no cap.
        dual_clip: bound ``c > 1`` of dual-clip PPO for negative advantages (arXiv:1912.09729);
            None: off.
    """

    delta: float | None = number(None, *POSITIVE, optional=True)
    dual_clip: float | None = number(None, "a number > 1", lambda x: x > 1, optional=True)

    def __call__(self, terms: Terms) -> Tensor:
        costs = -terms.advantages
        clipped = terms.ratio.clamp(1 - self.epsilon, self.highest)
        loss = _larger(self._capped(terms.ratio) * costs, clipped * costs)
        if self.dual_clip is None:
            return loss
        cap = self.dual_clip * costs
        return torch.where((costs > 0) & (loss > cap), cap, loss)

    def metrics(self, terms: Terms) -> Indicators:
        return super().metrics(terms._replace(ratio=self._capped(terms.ratio)))

    def _capped(self, ratio: Tensor) -> Tensor:
        return ratio if self.delta is None else ratio.clamp(max=self.delta)


@dataclass(frozen=True, kw_only=True)
class CeGppo(ClipRange):
    """Clipped tokens keep a bounded gradient (CE-GPPO, arXiv:2509.20712).

    Args:
        ce_gppo_low: gradient of tokens below the range, relative to the one at its lower bound.
        ce_gppo_high: gradient of tokens above the range, relative to the one at its upper bound.
    """

    ce_gppo_low: float = number(0.75, *NOT_NEGATIVE)
    ce_gppo_high: float = number(1.0, *NOT_NEGATIVE)

    def __call__(self, terms: Terms) -> Tensor:
        low, high = self.clipped(terms)
        weight = terms.ratio.detach().masked_fill(low, self.ce_gppo_low * (1 - self.epsilon))
        weight = weight.masked_fill(high, self.ce_gppo_high * self.highest)
        return -weight * terms.advantages * terms.logprobs


@dataclass(frozen=True, kw_only=True)
class Aspo(ClipRange):
    """Positive advantages are weighted by the inverse ratio (ASPO, arXiv:2510.06062).

    Args:
        aspo_ratio_max: upper bound of the weights; tokens at the bound keep their gradient.
    """

    aspo_ratio_max: float = number(3.0, "a number > 1", lambda x: x > 1)

    def __call__(self, terms: Terms) -> Tensor:
        ratio, (low, high) = terms.ratio.detach(), self.clipped(terms)
        weight = torch.where(terms.advantages > 0, ratio.reciprocal(), ratio)
        weight = weight.clamp(max=self.aspo_ratio_max).masked_fill(low | high, 0.0)
        return -weight * terms.advantages * terms.logprobs


@dataclass(frozen=True, kw_only=True)
class Fipo(Clip):
    """Advantages are weighted by how the rest of the sequence moved (FIPO, arXiv:2603.19835).

    In that weight, log-ratios of tokens with a ratio above ``dual_clip`` count as 0.

    Args:
        fipo_decay_rate: number of tokens after which a log-ratio counts half.
        fipo_clip: maximum distance of the weight from 1.
        fipo_clip_high_only: whether the weight is never below 1.
        fipo_safety_threshold: ratio above which a negative advantage gets a weight in [0.8, 1];
            None: off.
    """

    scope = "prefix"
    needs_token_ratios = True

    fipo_decay_rate: float = number(32.0, *POSITIVE)
    fipo_clip: float = number(0.2, "a number in [0, 1)", lambda x: 0 <= x < 1)
    fipo_clip_high_only: bool = choice(True, (True, False))
    fipo_safety_threshold: float | None = number(4.0, *POSITIVE, optional=True)

    def __call__(self, terms: Terms) -> Tensor:
        return super().__call__(terms._replace(advantages=terms.advantages * self._weight(terms)))

    def _weight(self, terms: Terms) -> Tensor:
        ratio = terms.ratio.detach()
        shift = terms.log_ratio.detach()
        if self.dual_clip is not None:
            shift = shift.masked_fill(ratio > self.dual_clip, 0.0)
        decay = 2 ** (-1 / self.fipo_decay_rate)
        future = terms.segments.running_sum(shift, decay, backwards=True)
        least = 1.0 if self.fipo_clip_high_only else 1 - self.fipo_clip
        weight = future.exp().clamp(least, 1 + self.fipo_clip)
        if self.fipo_safety_threshold is None:
            return weight
        risky = (terms.advantages < 0) & (ratio > self.fipo_safety_threshold)
        return torch.where(risky, weight.clamp(0.8, 1.0), weight)


@dataclass(frozen=True, kw_only=True)
class Cispo(Surrogate):
    """Clipped importance weights as detached coefficients (MiniMax-M1, arXiv:2506.13585).

    Args:
        epsilon_high: upper bound of the weight itself; None: ``epsilon``.
        epsilon: used only as the default of ``epsilon_high``.
    """

    epsilon: float = number(0.2, *NOT_NEGATIVE)
    epsilon_high: float | None = number(None, *NOT_NEGATIVE, optional=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.highest < 1:
            warnings.warn(
                "epsilon_high: cispo uses it as the raw upper bound of the importance weight; "
                f"{self.highest} scales down every update (ScaleRL uses 5.0)",
                stacklevel=5,
            )

    @property
    def highest(self) -> float:
        """The upper bound of the weight."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def __call__(self, terms: Terms) -> Tensor:
        weight = terms.ratio.clamp(max=self.highest).detach()
        return -weight * terms.advantages * terms.logprobs

    def metrics(self, terms: Terms) -> Indicators:
        clipped = (terms.ratio > self.highest) & (terms.advantages > 0)
        return {"cispo_clip_ratio": ("mean", clipped)}


@dataclass(frozen=True, kw_only=True)
class Sapo(Surrogate):
    """A sigmoid gate instead of the hard clip (SAPO, arXiv:2511.20347).

    Args:
        sapo_temperature_pos: steepness of the gate for advantages above 0.
        sapo_temperature_neg: steepness of the gate for other advantages.
    """

    sapo_temperature_pos: float = number(1.0, *POSITIVE)
    sapo_temperature_neg: float = number(1.05, *POSITIVE)

    def __call__(self, terms: Terms) -> Tensor:
        tau = by_sign(
            terms.advantages > 0,
            self.sapo_temperature_pos,
            self.sapo_temperature_neg,
            terms.ratio,
        )
        return -(4 / tau) * _sigmoid(tau * (terms.ratio - 1)) * terms.advantages


@dataclass(frozen=True, kw_only=True)
class Vespo(Surrogate):
    """A gamma-shaped, detached weight of the sequence's importance ratio (VESPO, arXiv:2602.10693).

    Args:
        vespo_k_pos: exponent of the weight for advantages of 0 or above.
        vespo_lambda_pos: decay rate of the weight for advantages of 0 or above.
        vespo_k_neg: exponent for negative advantages.
        vespo_lambda_neg: decay rate for negative advantages.
    """

    scope = "sequence"
    uses_rollout_weight = True
    needs_token_ratios = True

    LOG_FLOOR: ClassVar[float] = math.log(1e-8)
    LOG_CEILING: ClassVar[float] = 20.0

    vespo_k_pos: float = number(2.0, *NOT_NEGATIVE)
    vespo_lambda_pos: float = number(3.0, *NOT_NEGATIVE)
    vespo_k_neg: float = number(3.0, *NOT_NEGATIVE)
    vespo_lambda_neg: float = number(2.0, *NOT_NEGATIVE)

    def __call__(self, terms: Terms) -> Tensor:
        log_weight = terms.segments.expand(self._log_weight(terms))
        phi = self._phi(log_weight, terms.advantages >= 0)
        return -phi * terms.advantages * terms.logprobs

    def metrics(self, terms: Terms) -> Indicators:
        # an empty sequence has weight 1 and phi 1; its sign does not matter
        positive = terms.segments.mean((terms.advantages >= 0).to(terms.ratio.dtype)) > 0.5
        phi = self._phi(self._log_weight(terms), positive)
        return {"vespo/phi_seq_mean": ("per_sequence", phi)}

    def _log_weight(self, terms: Terms) -> Tensor:  # (B,), detached
        total = terms.segments.sum(terms.delta.detach().clamp(-20.0, 20.0))
        if terms.rollout_weight is not None:
            correction = terms.rollout_weight.log().clamp(self.LOG_FLOOR, self.LOG_CEILING)
            total = total + terms.segments.sum(correction)
        return total.clamp(self.LOG_FLOOR, self.LOG_CEILING)

    def _phi(self, log_weight: Tensor, positive: Tensor) -> Tensor:
        k = by_sign(positive, self.vespo_k_pos, self.vespo_k_neg, log_weight)
        lam = by_sign(positive, self.vespo_lambda_pos, self.vespo_lambda_neg, log_weight)
        lam = lam.clamp(min=1e-4)
        phi = torch.exp(lam + k * log_weight - lam * log_weight.exp())
        return phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True, kw_only=True)
class Gmpo(Surrogate):
    """Geometric mean of sign-aware clipped token ratios, per sequence (GMPO, arXiv:2507.20673).

    Args:
        gmpo_clip: bound on the log-ratios, in nats.
    """

    scope = "sequence"
    needs_token_ratios = True

    gmpo_clip: float = number(0.4, *POSITIVE)

    def __call__(self, terms: Terms) -> Tensor:
        # min(rho^s, exp(clip)^s)^s of the paper, in log space
        sign = by_sign(terms.advantages >= 0, 1.0, -1.0, terms.delta)
        clipped = sign * (sign * terms.log_ratio).clamp(max=self.gmpo_clip)
        ratio = terms.segments.expand(terms.segments.mean(clipped)).exp()
        return -ratio * terms.advantages

    def metrics(self, terms: Terms) -> Indicators:
        bound = self.gmpo_clip
        return clip_shares(*_clipped(terms.log_ratio, -bound, bound, terms.advantages))


class Pg(Surrogate):
    """Plain policy gradient without a ratio (arXiv:2504.02546)."""

    def __call__(self, terms: Terms) -> Tensor:
        return -terms.advantages * terms.logprobs


class Topr(Surrogate):
    """Tapered off-policy REINFORCE: ratios of negative advantages are capped (arXiv:2503.14286)."""

    def __call__(self, terms: Terms) -> Tensor:
        tapered = terms.ratio.clamp(0, 1).detach()
        weight = torch.where(terms.advantages >= 0, torch.ones_like(tapered), tapered)
        return -weight * terms.advantages * terms.logprobs
