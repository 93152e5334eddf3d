"""DAPO's dynamic sampling (arXiv:2503.14476): groups without variance are replaced."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from grpo_kernels.losses import Metrics
from grpo_trainer.config import GRPOConfig
from grpo_trainer.experience.collector import Collector, Scored
from grpo_trainer.experience.reader import share
from grpo_trainer.monitor import value_metric


def fill(
    first: Scored,
    more: Callable[[int], Scored],
    collector: Collector,
    args: GRPOConfig,
    accelerator: Accelerator,
) -> tuple[Scored, Metrics]:
    """Return a generation batch as large as ``first``, of groups that have something to learn from.

    Each round draws as many of the next prompts as groups are missing (rounded up to what the
    processes can share), at most ``max_resampling_rounds`` times. What is still missing then is
    taken from the groups without variance, in the order they were drawn: their advantages are 0.
    Groups that are not needed are discarded.

    Args:
        first: a scored batch.
        more: draws, generates and scores that many further prompts.
        collector: compares the completions that are taken.
        args, accelerator: of the run.
    """
    # fewest groups that all processes have an equal share of
    processes, size = accelerator.num_processes, args.num_generations
    unit = processes // math.gcd(processes, size)
    rounds = [first]
    useful: list[bool] = first.compared.signal.tolist()
    wanted = len(useful)
    while sum(useful) < wanted and len(rounds) <= args.max_resampling_rounds:
        missing = wanted - sum(useful)
        rounds.append(more(missing + -missing % unit))
        useful += rounds[-1].compared.signal.tolist()
    counts = {
        "resampling_rounds": len(rounds) - 1,
        "discarded_groups": len(useful) - wanted,
        "unfilled_groups": max(wanted - sum(useful), 0),
    }
    metrics = Metrics.merge(
        value_metric(f"dynamic_sampling/{name}", count, accelerator.device)
        for name, count in counts.items()
    )
    if len(rounds) == 1:
        return first, metrics
    # useful ones first, both kinds in the order they were drawn
    groups = sorted(range(len(useful)), key=lambda group: not useful[group])[:wanted]
    rows = [group * size + member for group in groups for member in range(size)]
    # a group may have been made by other processes than those that train on it
    everyone = [sample for part in rounds for sample in gather_object(part.samples)]
    rewards = torch.cat([part.rewards for part in rounds])
    rewards = rewards[torch.tensor(rows, device=rewards.device)]
    samples = [everyone[row] for row in rows[share(len(rows), accelerator)]]
    compared = collector.compare(rewards, samples, size)
    num_tokens = torch.stack([part.num_tokens for part in rounds]).sum()
    return Scored(samples, rewards, compared, num_tokens), metrics
