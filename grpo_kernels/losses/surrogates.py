"""Surrogates: the per-token policy objective, one small class each.

A surrogate is a forward-only torch expression of :class:`Terms`; autograd (or a traced, printed
kernel) derives its gradient. At ratio 1 a surrogate's gradient is ``-advantage`` per token, unless
its paper says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from grpo_kernels.losses.metrics import Indicators
from grpo_kernels.losses.terms import Terms

if TYPE_CHECKING:
    from grpo_kernels.losses.config import LossConfig


class Surrogate:
    """Base class. Subclasses define :meth:`__call__`, and :meth:`metrics` if they have any."""

    name: ClassVar[str]
    source: ClassVar[str]  # the paper
    scope: ClassVar[str] = "token"
    # zero advantage means zero loss and gradient, so such rows need no backward
    vanishes_at_zero_advantage: ClassVar[bool] = True
    # the surrogate folds the rollout correction into itself; it is not multiplied again
    uses_rollout_weight: ClassVar[bool] = False

    def __call__(self, terms: Terms, config: LossConfig) -> Tensor:
        """Per-token loss (T,)."""
        raise NotImplementedError

    def metrics(self, terms: Terms, config: LossConfig) -> Indicators:
        """What to log besides the loss: name to (kind, per-token or per-sequence values)."""
        return {}

    def validate(self, config: LossConfig) -> None:
        """Raises ValueError for settings this surrogate cannot honour."""


def _capped(ratio: Tensor, config: LossConfig) -> Tensor:
    """The two-sided upper bound of INTELLECT-2, arXiv:2505.07291."""
    return ratio if config.delta is None else ratio.clamp(max=config.delta)


def _by_sign(positive: Tensor, if_positive: float, otherwise: float, like: Tensor) -> Tensor:
    return torch.where(
        positive, torch.full_like(like, if_positive), torch.full_like(like, otherwise)
    )


def _clip_ratios(low: Tensor, high: Tensor) -> Indicators:
    """Metrics of which tokens are clipped from below and from above, each (T,) bool."""
    return {
        "clip_ratio/low_mean": ("mean", low),
        "clip_ratio/low_min": ("sequence_min", low),
        "clip_ratio/high_mean": ("mean", high),
        "clip_ratio/high_max": ("sequence_max", high),
        "clip_ratio/region_mean": ("mean", low | high),
    }


class Clip(Surrogate):
    """PPO's clipped ratio, with separate bounds (DAPO), ``delta`` and dual clip as options."""

    name = "clip"
    source = "arXiv:1707.06347, arXiv:2402.03300; delta arXiv:2505.07291; dual arXiv:1912.09729"

    def __call__(self, terms: Terms, config: LossConfig) -> Tensor:
        advantages = terms.advantages
        clipped = terms.ratio.clamp(1 - config.epsilon, 1 + config.upper_epsilon)
        loss = -torch.minimum(_capped(terms.ratio, config) * advantages, clipped * advantages)
        if config.dual_clip is None:
            return loss
        bounded = torch.minimum(loss, -config.dual_clip * advantages)
        return torch.where(advantages < 0, bounded, loss)

    def metrics(self, terms: Terms, config: LossConfig) -> Indicators:
        ratio, advantages = _capped(terms.ratio, config), terms.advantages
        low = (ratio < 1 - config.epsilon) & (advantages < 0)
        high = (ratio > 1 + config.upper_epsilon) & (advantages > 0)
        return _clip_ratios(low, high)


class Cispo(Surrogate):
    """Clipped importance weights as detached coefficients; ``epsilon_high`` is the raw bound."""

    name = "cispo"
    source = "MiniMax-M1, arXiv:2506.13585"

    def __call__(self, terms: Terms, config: LossConfig) -> Tensor:
        weight = terms.ratio.clamp(max=config.upper_epsilon).detach()
        return -weight * terms.advantages * terms.logprobs

    def metrics(self, terms: Terms, config: LossConfig) -> Indicators:
        clipped = (terms.ratio > config.upper_epsilon) & (terms.advantages > 0)
        return {"cispo_clip_ratio": ("mean", clipped)}


class Sapo(Surrogate):
    """A sigmoid gate in place of the hard clip."""

    name = "sapo"
    source = "arXiv:2511.20347"

    def __call__(self, terms: Terms, config: LossConfig) -> Tensor:
        tau = _by_sign(
            terms.advantages > 0,
            config.sapo_temperature_pos,
            config.sapo_temperature_neg,
            terms.ratio,
        )
        return -(4 / tau) * torch.sigmoid(tau * (terms.ratio - 1)) * terms.advantages


class Vespo(Surrogate):
    """A gamma-shaped, detached weight of the sequence's importance ratio."""

    name = "vespo"
    source = "arXiv:2602.10693"
    scope = "sequence"
    uses_rollout_weight = True

    LOG_FLOOR: ClassVar[float] = math.log(1e-8)
    LOG_CEILING: ClassVar[float] = 20.0

    def __call__(self, terms: Terms, config: LossConfig) -> Tensor:
        log_weight = terms.segments.expand(self._log_weight(terms))
        phi = self._phi(log_weight, terms.advantages >= 0, config)
        return -phi * terms.advantages * terms.logprobs

    def metrics(self, terms: Terms, config: LossConfig) -> Indicators:
        # an empty sequence has weight 1 and phi 1; its sign does not matter
        positive = terms.segments.mean((terms.advantages >= 0).to(terms.ratio.dtype)) > 0.5
        phi = self._phi(self._log_weight(terms), positive, config)
        return {"vespo/phi_seq_mean": ("per_sequence", phi)}

    def validate(self, config: LossConfig) -> None:
        if config.importance_sampling_level not in (None, "token"):
            raise ValueError(
                "importance_sampling_level: vespo forms its own sequence weight and expects "
                f"'token', got {config.importance_sampling_level!r}"
            )

    def _log_weight(self, terms: Terms) -> Tensor:  # (B,), detached
        total = terms.segments.sum(terms.delta.detach().clamp(-20.0, 20.0))
        if terms.rollout_weight is not None:
            correction = terms.rollout_weight.log().clamp(self.LOG_FLOOR, self.LOG_CEILING)
            total = total + terms.segments.sum(correction)
        return total.clamp(self.LOG_FLOOR, self.LOG_CEILING)

    def _phi(self, log_weight: Tensor, positive: Tensor, config: LossConfig) -> Tensor:
        k = _by_sign(positive, config.vespo_k_pos, config.vespo_k_neg, log_weight)
        lam = _by_sign(positive, config.vespo_lambda_pos, config.vespo_lambda_neg, log_weight)
        lam = lam.clamp(min=1e-4)
        phi = torch.exp(lam + k * log_weight - lam * log_weight.exp())
        return phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


class Gmpo(Surrogate):
    """Geometric mean of sign-aware clipped token ratios, one value per sequence."""

    name = "gmpo"
    source = "arXiv:2507.20673"
    scope = "sequence"

    def __call__(self, terms: Terms, config: LossConfig) -> Tensor:
        # min(rho^s, exp(clip)^s)^s of the paper, in log space
        sign = _by_sign(terms.advantages >= 0, 1.0, -1.0, terms.delta)
        clipped = sign * (sign * terms.log_ratio).clamp(max=config.gmpo_clip)
        ratio = terms.segments.expand(terms.segments.mean(clipped)).exp()
        return -ratio * terms.advantages

    def metrics(self, terms: Terms, config: LossConfig) -> Indicators:
        low = (terms.log_ratio < -config.gmpo_clip) & (terms.advantages < 0)
        high = (terms.log_ratio > config.gmpo_clip) & (terms.advantages > 0)
        return _clip_ratios(low, high)

    def validate(self, config: LossConfig) -> None:
        if config.importance_sampling_level not in (None, "token"):
            raise ValueError(
                "importance_sampling_level: gmpo takes the geometric mean itself and expects "
                f"'token', got {config.importance_sampling_level!r}"
            )


class Pg(Surrogate):
    """Plain policy gradient, no ratio."""

    name = "pg"
    source = "arXiv:2504.02546"

    def __call__(self, terms: Terms, config: LossConfig) -> Tensor:
        return -terms.advantages * terms.logprobs


class Topr(Surrogate):
    """Tapered off-policy REINFORCE: positives at weight 1, negatives at a truncated ratio."""

    name = "topr"
    source = "arXiv:2503.14286"

    def __call__(self, terms: Terms, config: LossConfig) -> Tensor:
        tapered = terms.ratio.clamp(0, 1).detach()
        weight = torch.where(terms.advantages >= 0, torch.ones_like(tapered), tapered)
        return -weight * terms.advantages * terms.logprobs


SURROGATES: dict[str, Surrogate] = {}


def register_surrogate(surrogate: Surrogate) -> Surrogate:
    """Adds a surrogate under its ``name``; a taken name is an error."""
    if surrogate.name in SURROGATES:
        raise ValueError(f"surrogate {surrogate.name!r} is already registered")
    SURROGATES[surrogate.name] = surrogate
    return surrogate


_BUILT_IN: tuple[Callable[[], Surrogate], ...] = (Clip, Cispo, Sapo, Vespo, Gmpo, Pg, Topr)
for _surrogate in _BUILT_IN:
    register_surrogate(_surrogate())
