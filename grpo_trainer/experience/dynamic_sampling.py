"""DAPO's dynamic sampling (arXiv:2503.14476): groups without variance are replaced."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from grpo_kernels.losses import Metrics, Stat
from grpo_trainer.config import GRPOConfig
from grpo_trainer.experience.advantages import Advantages, groups_with_signal
from grpo_trainer.experience.scored import Scored, share
from grpo_trainer.monitor import value_metric


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Fills a generation batch with groups that have something to learn from.

    After the first round, each further round draws as many of the next prompts as groups are
    missing (rounded up to what the processes can share), at most ``max_rounds`` times. What is
    still missing then is taken from the groups without variance, in the order they were drawn:
    their advantages are 0. Groups that are not needed are discarded.
    """

    max_rounds: int
    group_size: int
    has_signal: Callable[[Tensor], Tensor]  # (N, F) rewards -> (N / group_size,) bool
    compare: Callable[[Tensor], Advantages]  # (N, F) rewards -> their advantages
    accelerator: Accelerator

    @classmethod
    def from_config(
        cls,
        args: GRPOConfig,
        weights: Tensor,
        accelerator: Accelerator,
        compare: Callable[[Tensor], Advantages],
    ) -> DynamicSampling:
        """Return what ``args`` asks for; ``weights`` (F,) are those of the reward functions."""

        def has_signal(rewards: Tensor) -> Tensor:
            aggregation = args.multi_objective_aggregation
            return groups_with_signal(rewards, weights, args.num_generations, aggregation)

        return cls(
            max_rounds=args.max_resampling_rounds,
            group_size=args.num_generations,
            has_signal=has_signal,
            compare=compare,
            accelerator=accelerator,
        )

    def fill(self, first: Scored, more: Callable[[int], Scored]) -> tuple[Scored, Metrics]:
        """Return the batch, as large as ``first``; ``more`` scores that many further prompts."""
        rounds = [first]
        useful: list[bool] = self.has_signal(first.rewards).tolist()
        wanted = len(useful)
        while sum(useful) < wanted and len(rounds) <= self.max_rounds:
            missing = wanted - sum(useful)
            rounds.append(more(missing + -missing % self._unit))
            useful += self.has_signal(rounds[-1].rewards).tolist()
        metrics = self._metrics(len(rounds) - 1, sum(useful), len(useful), wanted)
        if len(rounds) == 1:
            return first, metrics
        # useful ones first, both kinds in the order they were drawn
        chosen = sorted(range(len(useful)), key=lambda group: not useful[group])[:wanted]
        return self._select(rounds, chosen), metrics

    @property
    def _unit(self) -> int:
        """Fewest groups that all processes have an equal share of."""
        processes = self.accelerator.num_processes
        return processes // math.gcd(processes, self.group_size)

    def _select(self, rounds: list[Scored], chosen: list[int]) -> Scored:
        size = self.group_size
        rows = [group * size + member for group in chosen for member in range(size)]
        # a group may have been made by other processes than those that train on it
        everyone = [rollout for part in rounds for rollout in gather_object(part.rollouts)]
        accelerator = self.accelerator
        mine = rows[share(len(rows), accelerator.process_index, accelerator.num_processes)]
        index = torch.tensor(rows, device=rounds[0].rewards.device)

        def chosen_of(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in rounds])[index]

        rewards = chosen_of("rewards")
        return Scored(
            rollouts=[everyone[row] for row in mine],
            rewards=rewards,
            prompt_lengths=chosen_of("prompt_lengths"),
            completion_lengths=chosen_of("completion_lengths"),
            truncated=chosen_of("truncated"),
            compared=self.compare(rewards),
        )

    def _metrics(self, rounds: int, useful: int, drawn: int, wanted: int) -> Metrics:
        values = {
            "resampling_rounds": rounds,
            "discarded_groups": drawn - wanted,
            "unfilled_groups": max(wanted - useful, 0),
        }
        stats: dict[str, Stat] = {}
        for name, value in values.items():
            name = f"dynamic_sampling/{name}"
            stats |= value_metric(name, value, self.accelerator.device).stats
        return Metrics(stats)
