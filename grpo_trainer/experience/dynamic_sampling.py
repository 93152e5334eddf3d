"""DAPO's dynamic sampling (arXiv:2503.14476): groups without variance are replaced."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from grpo_kernels.losses import Metrics
from grpo_trainer.config import GRPOConfig
from grpo_trainer.experience.advantages import Advantages, Scored, share
from grpo_trainer.monitor import value_metric


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Fills a generation batch with groups that have something to learn from.

    After the first round, each further round draws as many of the next prompts as groups are
    missing (rounded up to what the processes can share), at most ``max_resampling_rounds`` times.
    What is still missing then is taken from the groups without variance, in the order they were
    drawn: their advantages are 0. Groups that are not needed are discarded.
    """

    args: GRPOConfig
    accelerator: Accelerator
    compare: Callable[[Tensor], Advantages]  # (N, F) rewards -> their advantages

    def fill(self, first: Scored, more: Callable[[int], Scored]) -> tuple[Scored, Metrics]:
        """Return the batch, as large as ``first``; ``more`` scores that many further prompts."""
        # fewest groups that all processes have an equal share of
        processes = self.accelerator.num_processes
        unit = processes // math.gcd(processes, self.args.num_generations)
        rounds = [first]
        useful: list[bool] = first.compared.signal.tolist()
        wanted = len(useful)
        while sum(useful) < wanted and len(rounds) <= self.args.max_resampling_rounds:
            missing = wanted - sum(useful)
            rounds.append(more(missing + -missing % unit))
            useful += rounds[-1].compared.signal.tolist()
        counts = {
            "resampling_rounds": len(rounds) - 1,
            "discarded_groups": len(useful) - wanted,
            "unfilled_groups": max(wanted - sum(useful), 0),
        }
        device = self.accelerator.device
        metrics = Metrics.merge(
            value_metric(f"dynamic_sampling/{name}", count, device)
            for name, count in counts.items()
        )
        if len(rounds) == 1:
            return first, metrics
        # useful ones first, both kinds in the order they were drawn
        chosen = sorted(range(len(useful)), key=lambda group: not useful[group])[:wanted]
        return self._select(rounds, chosen), metrics

    def _select(self, rounds: list[Scored], chosen: list[int]) -> Scored:
        size = self.args.num_generations
        rows = [group * size + member for group in chosen for member in range(size)]
        # a group may have been made by other processes than those that train on it
        everyone = [rollout for part in rounds for rollout in gather_object(part.rollouts)]
        rewards = torch.cat([part.rewards for part in rounds])
        rewards = rewards[torch.tensor(rows, device=rewards.device)]
        return Scored(
            rollouts=[everyone[row] for row in rows[share(len(rows), self.accelerator)]],
            rewards=rewards,
            compared=self.compare(rewards),
            num_tokens=torch.stack([part.num_tokens for part in rounds]).sum(),
        )
