"""Compare completions with those of their group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from grpo_kernels.losses import Metrics, Stat
from grpo_trainer.config import AGGREGATIONS, SCALES
from grpo_trainer.data import Rollout


@dataclass(frozen=True, kw_only=True)
class Scored:
    """n completions of this process, and what all N completions of all processes were worth."""

    rollouts: list[Rollout]  # n
    rewards: Tensor  # (N, F) NaN: the reward does not apply
    compared: Advantages  # each (N,)
    num_tokens: Tensor  # () of prompts and completions, all processes'


def share(count: int, accelerator: Accelerator) -> slice:
    """Return the rows of ``count`` that belong to this process."""
    process, processes = accelerator.process_index, accelerator.num_processes
    return slice(process * count // processes, (process + 1) * count // processes)


def rollout_metrics(
    names: list[str],
    scored: Scored,
    lengths: Tensor,  # (N,) tokens of the policy
    truncated: Tensor,  # (N,) 1: ended without an end-of-sequence token
) -> Metrics:
    """Say what a generation batch tells of rewards and completion lengths."""
    stats = _reward_stats(names, scored.rewards, scored.compared)
    stats["completions/clipped_ratio"] = _mean(truncated)
    for kind in ("mean", "min", "max"):
        stats[f"completions/{kind}_length"] = _stat(kind, lengths)
        stats[f"completions/{kind}_terminated_length"] = _stat(kind, lengths, truncated == 0)
    return Metrics(stats)


def _reward_stats(names: list[str], rewards: Tensor, compared: Advantages) -> dict[str, Stat]:
    stats = {}
    for name, values in zip(names, rewards.unbind(1), strict=True):
        stats[f"rewards/{name}/mean"] = _mean(values)
        stats[f"rewards/{name}/std"] = _mean(nan_std(values, 0))
    stats["reward"] = _mean(compared.rewards)
    stats["reward_std"] = _mean(nan_std(compared.rewards, 0))
    stats["frac_reward_zero_std"] = _mean(compared.zero_std)
    return stats


def _mean(values: Tensor) -> Stat:
    return _stat("mean", values, ~values.isnan())


def _stat(kind: str, values: Tensor, valid: Tensor | None = None) -> Stat:
    values = values.double()
    valid = torch.ones_like(values, dtype=torch.bool) if valid is None else valid
    neutral = {"mean": 0.0, "min": torch.inf, "max": -torch.inf}[kind]
    kept = torch.where(valid, values, neutral)
    total = {"mean": kept.sum(), "min": kept.amin(), "max": kept.amax()}[kind]
    return Stat(kind, total, valid.double().sum())


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
