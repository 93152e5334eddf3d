"""KL penalties between the policy and the reference model, estimated from one sample per token.

Estimators as in J. Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_kernels.losses.ratios import LOG_RATIO_LIMIT

# up to here so many terms of exp's series are exact in fp64
_NEAR, _TERMS = 0.5, 15


def _k1(x: Tensor) -> Tensor:
    return -x


def _k2(x: Tensor) -> Tensor:
    return 0.5 * x * x


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


def _abs(x: Tensor) -> Tensor:
    return x.abs()


# each takes x = lr - lp
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "abs": _abs,
}


def kl_penalty(
    logprobs: Tensor,  # (T,)
    ref_logprobs: Tensor,  # (T,)
    ratio: Tensor,  # (T,) c1, with its gradient
    estimator: str,
    bias_correction: bool,
) -> Tensor:
    """Return the per-token KL estimate (T,).

    With ``bias_correction`` the estimate is multiplied by the importance ratio, which changes the
    gradient even where the ratio is 1 (DeepSeek-V3.2, arXiv:2512.02556).
    """
    estimate = KL_ESTIMATORS[estimator](ref_logprobs - logprobs)
    return estimate * ratio if bias_correction else estimate
