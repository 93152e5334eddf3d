"""One completion: a record that grows on its way from the engine to the loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grpo_trainer.data.images import ImageInputs
from grpo_trainer.data.prompts import Prompt
from grpo_trainer.data.sampling import Row


@dataclass
class Rollout:
    """One completion. An engine, tools or a function of the user's make it; scoring adds to it."""

    prompt: Prompt
    prompt_ids: list[int]
    completion: Any  # text, or messages for a conversational prompt
    completion_ids: list[int]
    truncated: bool = False  # ended without an end-of-sequence token
    logprobs: list[float] | None = None  # of the tokens, by the engine that drew them
    sampling_mask: list[list[int]] | None = None  # ids that its filters left, by token
    env_mask: list[int] | None = None  # 1: the policy's token, 0: a tool's; None: all are its own
    images: ImageInputs | None = None  # of the prompt
    # of scoring
    row: Row | None = None  # of the dataset
    extra: dict[str, Any] = field(default_factory=dict)  # what reward functions log beside it
    left_out: bool = False  # of the loss

    @property
    def by_policy(self) -> list[int]:
        """1 for each token that the policy drew, 0 for those of tools and environments."""
        return [1] * len(self.completion_ids) if self.env_mask is None else self.env_mask

    @property
    def in_loss(self) -> list[int]:
        """1 for each token that is trained on."""
        return [0] * len(self.completion_ids) if self.left_out else self.by_policy
