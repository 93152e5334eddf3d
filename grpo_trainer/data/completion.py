"""One completion, as it is handed from its making to the loss."""

from __future__ import annotations

from typing import Any, NamedTuple

from grpo_trainer.data.prompts import Prompt
from grpo_trainer.data.sampling import Row


class Rollout(NamedTuple):
    """One completion."""

    prompt: Prompt
    prompt_ids: list[int]
    completion: Any  # text, or messages for a conversational prompt
    completion_ids: list[int]
    truncated: bool  # ended without an end-of-sequence token
    logprobs: list[float] | None = None  # of the tokens, by the engine that drew them
    sampling_mask: list[list[int]] | None = None  # ids that its filters left, by token
    env_mask: list[int] | None = None  # 1: the policy's token, 0: a tool's; None: all are its own
    extra: dict[str, Any] | None = None  # what reward functions log beside it
    row: Row | None = None  # of the dataset

    @property
    def by_policy(self) -> list[int]:
        """1 for each token that the policy drew, 0 for those of tools and environments."""
        return [1] * len(self.completion_ids) if self.env_mask is None else self.env_mask
