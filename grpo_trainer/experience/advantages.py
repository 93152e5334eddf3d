"""Advantages from rewards: pure torch, NaN means "this reward does not apply"."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_trainer.config import AGGREGATIONS, SCALES

STD_OFFSET = 1e-4  # keeps groups of nearly equal rewards from exploding
NO_SPREAD = 1e-8  # a smaller standard deviation is rounding


class Advantages(NamedTuple):
    """What the group comparison yields for N completions."""

    advantages: Tensor  # (N,) finite
    rewards: Tensor  # (N,) weighted sum of the rewards; NaN where none applies
    zero_std: Tensor  # (N,) bool: the spread that the completion is compared with is 0
    signal: Tensor  # (N / group_size,) bool: the group's completions get different advantages


def compute_advantages(
    rewards: Tensor,  # (N, F)
    weights: Tensor,  # (F,)
    group_size: int,
    scale: str = "group",
    aggregation: str = "sum_then_normalize",
) -> Advantages:
    """Compare each completion with the others of its prompt.

    Args:
        rewards: (N, F) one column per reward function; NaN: not applicable. Groups are
            ``group_size`` consecutive rows.
        weights: (F,) weight of each reward function.
        group_size: completions per prompt; N is a multiple of it.
        scale: ``group`` divides by the group's standard deviation (GRPO, arXiv:2402.03300),
            ``batch`` by that of all N, ``none`` does not divide (Dr. GRPO, arXiv:2503.20783).
        aggregation: ``sum_then_normalize``, or ``normalize_then_sum``, which normalises each
            reward in its group, then the weighted sum over all N (GDPO, arXiv:2601.05242), and
            does not use ``scale``.
    """
    grouped = rewards.reshape(-1, group_size, rewards.shape[1])
    total = _weighted_sum(rewards, weights)
    centred, std = _AGGREGATE[aggregation](grouped, weights, scale)
    zero_std = (std < NO_SPREAD).expand_as(centred)
    # equal rewards stay equal when centred, while their standard deviation may be rounding
    highest = centred.masked_fill(centred.isnan(), -torch.inf).amax(1)
    lowest = centred.masked_fill(centred.isnan(), torch.inf).amin(1)
    if scale != "none" or aggregation == "normalize_then_sum":
        centred = centred / (std + STD_OFFSET)
    advantages = centred.reshape(-1)
    advantages = torch.where(advantages.isfinite(), advantages, 0.0)
    return Advantages(advantages, total, zero_std.reshape(-1), highest - lowest >= NO_SPREAD)


def nan_std(values: Tensor, dim: int) -> Tensor:
    """Return the standard deviation over ``dim`` (kept), Bessel-corrected; 0 for under 2 values."""
    count = (~values.isnan()).sum(dim, keepdim=True)
    deviations = (values - values.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (deviations / (count - 1).clamp(min=1)).sqrt()


def _sum_then_normalize(grouped: Tensor, weights: Tensor, scale: str) -> tuple[Tensor, Tensor]:
    total = _weighted_sum(grouped, weights)  # (groups, G)
    centred = total - total.nanmean(1, keepdim=True)
    return centred, _SCALE[scale](total)


def _normalize_then_sum(grouped: Tensor, weights: Tensor, scale: str) -> tuple[Tensor, Tensor]:
    centred = grouped - grouped.nanmean(1, keepdim=True)
    total = _weighted_sum(centred / (nan_std(grouped, 1) + STD_OFFSET), weights)
    return total - total.nanmean(), _batch_std(total)


def _weighted_sum(rewards: Tensor, weights: Tensor) -> Tensor:  # (..., F) -> (...)
    total = (rewards * weights).nansum(-1)
    return total.masked_fill(rewards.isnan().all(-1), torch.nan)


def _group_std(rewards: Tensor) -> Tensor:
    return nan_std(rewards, 1)


def _batch_std(rewards: Tensor) -> Tensor:
    return nan_std(rewards.reshape(-1), 0)


_AGGREGATE = dict(zip(AGGREGATIONS, (_sum_then_normalize, _normalize_then_sum), strict=True))
# "none" reports the group's spread, for the log, without dividing by it
_SCALE = dict(zip(SCALES, (_group_std, _batch_std, _group_std), strict=True))
