"""Completions with their rewards: what generation hands to the comparison within groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from grpo_kernels.losses import Metrics
from grpo_trainer.metrics import RolloutColumns
from grpo_trainer.prompts import Prompt
from grpo_trainer.rollout import Rollouts
from grpo_trainer.sampling import Row


class Rollout(NamedTuple):
    """One completion."""

    prompt: Prompt
    prompt_ids: list[int]
    completion: Any  # text, or messages for a conversational prompt
    completion_ids: list[int]
    truncated: bool  # ended without an end-of-sequence token
    logprobs: list[float] | None = None  # of the tokens, by the engine that drew them
    kept: list[list[int]] | None = None  # ids that its filters left to choose from, by token
    env_mask: list[int] | None = None  # 1: the policy's token, 0: a tool's; None: all are its own
    extra: dict[str, Any] | None = None  # what reward functions log beside it
    row: Row | None = None  # of the dataset

    @property
    def by_policy(self) -> list[int]:
        """1 for each token that the policy drew, 0 for those of tools and environments."""
        return [1] * len(self.completion_ids) if self.env_mask is None else self.env_mask


@dataclass(frozen=True)
class Sampled:
    """n completions, and what came with them."""

    rollouts: list[Rollout]
    # more arguments of reward functions, one value per completion each
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=lambda: Metrics({}))


class Source(Protocol):
    """Where completions come from, if not from one call of the engine."""

    def sample(self, rows: list[Row], rollouts: Rollouts) -> Sampled:
        """One completion per row. In a distributed run every process calls it."""
        ...


class Scored(NamedTuple):
    """n completions of this process, and what all N completions of all processes were worth."""

    rollouts: list[Rollout]  # n
    rewards: Tensor  # (N, F) NaN: the reward does not apply
    columns: RolloutColumns  # each (N,)


def share(count: int, process: int, processes: int) -> slice:
    """The rows of ``count`` that belong to a process."""
    return slice(process * count // processes, (process + 1) * count // processes)
