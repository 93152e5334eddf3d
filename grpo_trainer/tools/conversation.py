"""A completion in several turns, as it grows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpo_trainer.data import Rollout
from grpo_trainer.tools.parse import Message
from grpo_trainer.tools.run import Call
from grpo_trainer.tools.schema import Toolbox

T = TypeVar("T")


@dataclass
class Conversation:
    """One prompt and what the policy and its tools have added so far.

    Args:
        rollout: the completion, which has nothing yet.
        toolbox: what the policy can call.
        budget: tokens for the whole completion, results of tools included.
        environment: what its tools act upon, if there is one.
    """

    rollout: Rollout
    toolbox: Toolbox
    budget: int
    environment: Any = None
    calls: list[Call] = field(default_factory=list)  # of the last turn, not answered yet
    rounds: int = 0  # of calls that were answered
    over: bool = False
    _turn: int = 0  # where the current turn begins

    @property
    def ids(self) -> list[int]:
        """What the policy reads next."""
        return self.rollout.prompt_ids + self.rollout.completion_ids

    @property
    def room(self) -> int:
        """Tokens left."""
        return self.budget - len(self.rollout.completion_ids)

    @property
    def turn_ids(self) -> list[int]:
        return self.rollout.completion_ids[self._turn :]

    @property
    def turn_prefix(self) -> list[int]:
        return self.rollout.prompt_ids + self.rollout.completion_ids[: self._turn]

    def add_tokens(
        self, ids: list[int], logprobs: list[float] | None, mask: list[list[int]] | None
    ) -> None:
        """Add tokens of the policy, as many as there is room for."""
        count = min(len(ids), self.room)
        self._extend(ids[:count], 1, logprobs and logprobs[:count], mask and mask[:count])

    def end_turn(self, message: Message, complete: bool) -> None:
        """Add what the policy said. A turn that is not ``complete`` calls nothing."""
        self.rollout.completion.append(message)
        self.rollout.truncated = not complete
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        self.calls = [
            Call(each["name"], each["arguments"], self.toolbox.get(each["name"]))
            for each in functions
        ]
        self.over = not complete or not self.calls

    def add_results(self, messages: list[Message], ids: list[int]) -> None:
        """Add what the tools answered. Where it leaves no room for another turn, it is left out."""
        self.calls = []
        if len(ids) >= self.room:
            self.over = self.rollout.truncated = True
            return
        self.rounds += 1
        self.rollout.completion += messages
        self._extend(ids, 0, [math.nan] * len(ids), [[]] * len(ids))
        self._turn = len(self.rollout.completion_ids)

    def _extend(
        self,
        ids: list[int],
        by_policy: int,
        logprobs: list[float] | None,
        mask: list[list[int]] | None,
    ) -> None:
        rollout = self.rollout
        rollout.completion_ids += ids
        rollout.env_mask = _longer(rollout.env_mask, [by_policy] * len(ids))
        rollout.logprobs = _longer(rollout.logprobs, logprobs)
        rollout.sampling_mask = _longer(rollout.sampling_mask, mask)


def _longer(column: list[T] | None, values: list[T] | None) -> list[T] | None:
    return None if column is None or values is None else column + values
