"""Completions with their rewards, and what a generation batch of them says."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.losses import Metrics, Stat
from grpo_trainer.data import Rollout
from grpo_trainer.experience.advantages import Advantages, nan_std


class RolloutColumns(NamedTuple):
    """One row per completion of the generation batch, all processes'. Each (N,)."""

    prompt_lengths: Tensor
    completion_lengths: Tensor
    truncated: Tensor  # 1: ended without an end-of-sequence token


class Scored(NamedTuple):
    """n completions of this process, and what all N completions of all processes were worth."""

    rollouts: list[Rollout]  # n
    rewards: Tensor  # (N, F) NaN: the reward does not apply
    columns: RolloutColumns  # each (N,)


def share(count: int, process: int, processes: int) -> slice:
    """The rows of ``count`` that belong to a process."""
    return slice(process * count // processes, (process + 1) * count // processes)


def rollout_metrics(
    names: list[str],
    rewards: Tensor,  # (N, F)
    advantages: Advantages,
    columns: RolloutColumns,
) -> Metrics:
    """What a generation batch says about rewards and completion lengths."""
    stats = _reward_stats(names, rewards, advantages)
    lengths, finished = columns.completion_lengths, columns.truncated == 0
    stats["completions/clipped_ratio"] = _mean(columns.truncated)
    for kind in ("mean", "min", "max"):
        stats[f"completions/{kind}_length"] = _stat(kind, lengths)
        stats[f"completions/{kind}_terminated_length"] = _stat(kind, lengths, finished)
    return Metrics(stats)


def _reward_stats(names: list[str], rewards: Tensor, advantages: Advantages) -> dict[str, Stat]:
    stats = {}
    for name, values in zip(names, rewards.unbind(1), strict=True):
        stats[f"rewards/{name}/mean"] = _mean(values)
        stats[f"rewards/{name}/std"] = _mean(nan_std(values, 0))
    stats["reward"] = _mean(advantages.rewards)
    stats["reward_std"] = _mean(nan_std(advantages.rewards, 0))
    stats["frac_reward_zero_std"] = _mean(advantages.zero_std)
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
