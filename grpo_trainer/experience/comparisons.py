"""Advantages from other papers: functions and objects for ``advantages=``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.common import check_number
from grpo_trainer.experience.advantages import (
    NO_SPREAD,
    STD_OFFSET,
    AdvantageFunction,
    nan_std,
    weighted_sum,
)


def rloo(rewards: Tensor, weights: Tensor, group_size: int) -> Tensor:
    """Subtract the mean of the other completions of the group (RLOO, arXiv:2402.14740)."""
    totals = _groups(rewards, weights, group_size)
    count = (~totals.isnan()).sum(1, keepdim=True)
    others = (totals.nansum(1, keepdim=True) - totals) / (count - 1).clamp(min=1)
    return _finite(torch.where(count > 1, totals - others, 0.0))


def reinforce_plus_plus(rewards: Tensor, weights: Tensor, group_size: int) -> Tensor:
    """Subtract the group's mean, then normalize over the batch (REINFORCE++ with baseline,
    arXiv:2501.03262)."""
    totals = _groups(rewards, weights, group_size)
    centred = (totals - totals.nanmean(1, keepdim=True)).flatten()
    return _finite((centred - centred.nanmean()) / (nan_std(centred, 0) + STD_OFFSET))


def maxrl(rewards: Tensor, weights: Tensor, group_size: int) -> Tensor:
    """Divide the distance from the group's mean by that mean, for rewards >= 0, so that hard
    prompts count more (MaxRL, arXiv:2602.02710)."""
    totals = _groups(rewards, weights, group_size)
    mean = totals.nanmean(1, keepdim=True)
    return _finite(torch.where(mean > NO_SPREAD, (totals - mean) / mean, 0.0))


@dataclass(frozen=True)
class PassAtK:
    """Compare the pass rates of sets of ``k`` random completions of the group that include this
    completion (pass@k training, arXiv:2508.10751). A reward above 0 counts as passed.

    Completions without a reward are left out. If fewer than ``k`` are left, all of them are used.

    Raises:
        ValueError: ``k`` is not an integer >= 1; in a call: a group has fewer completions.
    """

    k: int

    def __post_init__(self) -> None:
        check_number("k", self.k, "an integer >= 1", lambda k: isinstance(k, int) and k >= 1)

    def __call__(self, rewards: Tensor, weights: Tensor, group_size: int) -> Tensor:
        if self.k > group_size:
            raise ValueError(
                f"advantages: expected groups of at least k = {self.k} completions, got "
                f"{group_size}"
            )
        totals = _groups(rewards, weights, group_size)
        passed = totals > 0
        count = (~totals.isnan()).sum(1, keepdim=True)
        failures = count - passed.sum(1, keepdim=True)
        k = count.clamp(max=self.k)
        mean = 1 - self._none_of(failures, count, k)
        spread = (mean * (1 - mean)).sqrt()
        # if this completion failed, one of the k - 1 others must pass
        of_failed = 1 - self._none_of(failures - 1, count - 1, k - 1)
        with_it = torch.where(passed, 1.0, of_failed).masked_fill(totals.isnan(), torch.nan)
        return _finite(torch.where(spread > NO_SPREAD, (with_it - mean) / spread, 0.0))

    def _none_of(self, failures: Tensor, count: Tensor, k: Tensor) -> Tensor:
        """Return the probability that k of ``count`` completions have all failed."""
        chance = torch.ones_like(failures, dtype=torch.float64)
        for drawn in range(self.k):
            failed = (failures - drawn).clamp(min=0) / (count - drawn).clamp(min=1)
            chance = torch.where(drawn < k, chance * failed, chance)
        return chance


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "maxrl": maxrl,
}


def advantages_of(source: AdvantageFunction | str | None) -> AdvantageFunction | None:
    """Return the named function, for example ``pass_at_4``; functions are returned unchanged.

    Raises:
        ValueError: the name is unknown.
    """
    if not isinstance(source, str):
        return source
    if (found := re.fullmatch(r"pass_at_(\d+)", source)) is not None:
        return PassAtK(int(found[1]))
    if source not in ADVANTAGES:
        names = ", ".join([*ADVANTAGES, "pass_at_K"])
        raise ValueError(f"advantages: expected a function or one of {names}; got {source!r}")
    return ADVANTAGES[source]


def _groups(rewards: Tensor, weights: Tensor, group_size: int) -> Tensor:
    return weighted_sum(rewards, weights).reshape(-1, group_size)


def _finite(advantages: Tensor) -> Tensor:
    """Return (N,); a completion without a reward has the advantage 0."""
    return advantages.flatten().nan_to_num(nan=0.0)
