"""Scoring completions: what reward functions are given, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerState

from grpo_trainer.data import Row
from grpo_trainer.rewards import RewardFunction, RewardLog, score
from grpo_trainer.rollout import Sampled

# (inputs, prompts, completions, completion_ids_list) -> (N, F) rewards of all processes
RewardCalculation: TypeAlias = Callable[[list[Row], list[Any], list[Any], list[list[int]]], Tensor]
# passed to reward functions under other names
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class Scorer:
    """Scores the completions of this process, and joins the rewards of all.

    Args:
        rewards: the reward functions.
        calculate: in place of :meth:`calculate_rewards`, with its arguments.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        rewards: list[RewardFunction],
        calculate: RewardCalculation | None = None,
    ) -> None:
        self._accelerator = accelerator
        self.rewards = rewards
        self._calculate = calculate or self.calculate_rewards

    def calculate_rewards(
        self,
        inputs: list[Row],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> Tensor:  # (N, F)
        """Return what each reward function says of the completions of all N processes' prompts.

        Args:
            inputs: this process's rows, one per completion; functions get their columns.
            prompts, completions, completion_ids_list: this process's.
        """
        state, log = self._asked
        names = [name for name in inputs[0] if name not in _NOT_COLUMNS]
        arguments: dict[str, Any] = {name: [row[name] for row in inputs] for name in names}
        arguments |= {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids_list,
            "trainer_state": state,
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
        }
        rewards = score(self.rewards, len(inputs), arguments)
        return self._accelerator.gather(rewards.to(self._accelerator.device))

    def score(
        self, rows: list[Row], sampled: Sampled, state: TrainerState
    ) -> tuple[Tensor, RewardLog]:  # (N, F)
        """Return the rewards of all processes, and what functions logged of this one's.

        Raises:
            ValueError: they are not one per completion and function.
        """
        rollouts, more = sampled.rollouts, sampled.columns
        log = RewardLog(len(rows))
        self._asked = state, log
        rewards = self._calculate(
            [{**row, **{name: more[name][i] for name in more}} for i, row in enumerate(rows)],
            [rollout.prompt for rollout in rollouts],
            [rollout.completion for rollout in rollouts],
            [rollout.completion_ids for rollout in rollouts],
        )
        shape = (len(rows) * self._accelerator.num_processes, len(self.rewards))
        if not isinstance(rewards, Tensor) or rewards.shape != shape:
            got = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
            raise ValueError(
                f"_calculate_rewards: expected a tensor of {shape}, all processes' completions by "
                f"reward functions, got {got}"
            )
        return rewards.to(self._accelerator.device, torch.float32), log
