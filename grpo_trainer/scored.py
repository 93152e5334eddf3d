"""Completions with their rewards: what generation hands to the comparison within groups."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from grpo_trainer.metrics import RolloutColumns
from grpo_trainer.prompts import Prompt


class Rollout(NamedTuple):
    """One completion."""

    prompt: Prompt
    prompt_ids: list[int]
    completion: Any  # text, or messages for a conversational prompt
    completion_ids: list[int]
    truncated: bool  # ended without an end-of-sequence token
    logprobs: list[float] | None = None  # of the tokens, by the engine that drew them
    extra: dict[str, Any] | None = None  # what reward functions log beside it


class Scored(NamedTuple):
    """n completions of this process, and what all N completions of all processes were worth."""

    rollouts: list[Rollout]  # n
    rewards: Tensor  # (N, F) NaN: the reward does not apply
    columns: RolloutColumns  # each (N,)


def share(count: int, process: int, processes: int) -> slice:
    """The rows of ``count`` that belong to a process."""
    return slice(process * count // processes, (process + 1) * count // processes)
