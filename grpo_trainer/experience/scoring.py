"""Comparing rewards within groups: from completions to :class:`Scored`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from grpo_kernels.losses import Metrics
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import Advantages, Sample, Scored, has_images
from grpo_trainer.experience.advantages import (
    COMPLETION_ARGUMENTS,
    AdvantageFunction,
    advantages_by,
    check_advantages,
    compute_advantages,
)
from grpo_trainer.experience.comparisons import advantages_of
from grpo_trainer.experience.prompts import share
from grpo_trainer.monitor import value_metric


class Comparison:
    """Turns the rewards of completions into advantages.

    Args:
        names: of the reward functions.
        args: the settings of the run.
        accelerator: connects the processes.
        advantages: replaces :func:`compute_advantages`: a function, or the name of one.

    Raises:
        ValueError: there is not one weight per reward function, or ``advantages`` cannot be called
            or conflicts with a setting.
    """

    def __init__(
        self,
        names: Sequence[str],
        args: GRPOConfig,
        accelerator: Accelerator,
        advantages: AdvantageFunction | str | None = None,
    ) -> None:
        self._args = args
        self._accelerator = accelerator
        self._function = function = advantages_of(advantages)
        self._arguments = [] if function is None else check_advantages(function, args)
        weights = args.reward_weights or [1.0] * len(names)
        if len(weights) != len(names):
            raise ValueError(
                f"reward_weights: expected {len(names)} values, one per reward function, "
                f"got {len(weights)}"
            )
        self.weight_of = dict(zip(names, weights, strict=True))
        self._weights = torch.tensor(weights, device=accelerator.device)

    def __call__(
        self,
        rewards: Tensor,  # (N, F)
        samples: Sequence[Sample],  # of this process
        group_size: int,
    ) -> Advantages:
        """Return the advantages of all N completions."""
        if self._function is None:
            compared = compute_advantages(
                rewards,
                self._weights,
                group_size,
                scale=self._args.scale_rewards,
                aggregation=self._args.multi_objective_aggregation,
            )
            return compared._replace(advantages=compared.advantages.float())
        completions = {
            name: gather_object([getattr(sample, COMPLETION_ARGUMENTS[name]) for sample in samples])
            for name in self._arguments
        }
        return advantages_by(
            self._function,
            rewards,
            self._weights,
            group_size=group_size,
            completions=completions,
            lengths=gather_object([len(sample.completion_ids) for sample in samples]),
        )

    def checked(self, rewards: Any, count: int) -> Tensor:
        """Return rewards of ``count`` completions per process, (N, F) fp32; ValueError unless there
        is one per completion and function."""
        shape = (count * self._accelerator.num_processes, len(self._weights))
        if not isinstance(rewards, Tensor) or rewards.shape != shape:
            got = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
            raise ValueError(
                f"_calculate_rewards: expected a tensor of {shape}, all processes' completions x "
                f"reward functions, got {got}"
            )
        return rewards.to(self._accelerator.device, torch.float32)


def measure(samples: Sequence[Sample], accelerator: Accelerator) -> Tensor:  # (N, 3)
    """Return all processes' prompt and completion lengths, and which completions were truncated.

    Raises:
        ValueError: some processes would run the model's image part and others would not.
    """
    measures = [
        [len(sample.prompt_ids) for sample in samples],
        [sum(sample.by_policy) for sample in samples],
        [sample.truncated for sample in samples],
        [has_images([sample.images]) for sample in samples],
    ]
    table = torch.tensor(measures, dtype=torch.float32).T
    table = accelerator.gather(table.to(accelerator.device))
    seeing = table[:, 3]
    if accelerator.num_processes > 1 and seeing.min() != seeing.max():
        raise ValueError(
            "images: with several processes, expected images in all prompts of a generation batch "
            "(including tools' answers) or in none, since forwards run together, got them in "
            f"{int(seeing.sum())} of {len(seeing)}"
        )
    return table[:, :3]


def fill(
    first: Scored,
    more: Callable[[int], Scored],
    compare: Comparison,
    args: GRPOConfig,
    accelerator: Accelerator,
) -> tuple[Scored, Metrics]:
    """Return a batch as large as ``first``, of groups with different rewards: DAPO's dynamic
    sampling (arXiv:2503.14476).

    Each round draws as many of the next prompts as groups are missing (rounded up so that the
    processes get equal shares), for at most ``max_resampling_rounds`` rounds. If groups are still
    missing then, groups without variance fill the batch, in the order they were drawn; their
    advantages are 0. Groups that are not needed are discarded.

    Args:
        first: a scored generation batch.
        more: draws, generates and scores that many more prompts.
        compare: compares the completions of the filled batch.
        args: the settings of the run.
        accelerator: joins the processes.
    """
    size = args.num_generations
    # the fewest groups that split evenly over processes; groups in flight stay whole
    unit = accelerator.num_processes
    if args.max_staleness is None:
        unit //= math.gcd(unit, size)
    rounds = [first]
    useful: list[bool] = first.compared.signal.tolist()
    count = len(useful)
    while sum(useful) < count and len(rounds) <= args.max_resampling_rounds:
        missing = count - sum(useful)
        rounds.append(more(missing + -missing % unit))
        useful += rounds[-1].compared.signal.tolist()
    counts = {
        "resampling_rounds": len(rounds) - 1,
        "discarded_groups": len(useful) - count,
        "unfilled_groups": max(count - sum(useful), 0),
    }
    metrics = Metrics.merge(
        value_metric(f"dynamic_sampling/{name}", number, accelerator.device)
        for name, number in counts.items()
    )
    if len(rounds) == 1:
        return first, metrics
    # useful groups first, both kinds in the order they were drawn
    groups = sorted(range(len(useful)), key=lambda group: not useful[group])[:count]
    places = [group * size + member for group in groups for member in range(size)]
    # a group may be generated and trained on by different processes
    everyone = [sample for part in rounds for sample in gather_object(part.samples)]
    rewards = torch.cat([part.rewards for part in rounds])
    rewards = rewards[torch.tensor(places, device=rewards.device)]
    own = share(len(places), accelerator)
    samples = [everyone[place] for place in places[own]]
    num_tokens = torch.stack([part.num_tokens for part in rounds]).sum()
    return Scored(samples, rewards, compare(rewards, samples, size), num_tokens, own), metrics
