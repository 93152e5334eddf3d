"""Completions with their rewards, and what a generation batch of them says."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from grpo_kernels.losses import Metrics, Stat
from grpo_trainer.data import Rollout
from grpo_trainer.experience.advantages import Advantages, nan_std


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
