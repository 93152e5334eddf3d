"""A curriculum: a function of the user's decides which prompts come next."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from grpo_trainer.config import GRPOConfig
from grpo_trainer.imports import load_function
from grpo_trainer.prompts import Prompt, shortened
from grpo_trainer.sampling import PromptStream, Row
from grpo_trainer.scored import Scored

# (prompts, completions, rewards, metas) -> prompts of the next generation batch
PromptsFunction: TypeAlias = Callable[
    [list[Prompt], list[list[Any]], list[float], list[dict[str, Any]]], Sequence[Prompt | None]
]

_PLAIN = (type(None), bool, int, float, str, Tensor)


class Curriculum:
    """Training prompts, of which a function writes those of the next generation batch.

    After each generation batch of training, when it is scored, the function gets one entry per
    prompt: the prompt, the list of its completions, the mean of their rewards (NaN where no reward
    applied), and the other columns of its row. It returns one entry per prompt. A prompt is trained
    on in the next batch, in the same place, with the columns of the row that it replaces; None
    stands for the dataset's next row. So the dataset goes on only where None is returned, and is
    asked for the first batch, and for what dynamic sampling draws in addition.

    The function runs on the main process only; all others take over what it returns. What it has
    returned is in a checkpoint; what it remembers by itself is not.

    Args:
        prompts: the dataset's.
        function: the function.
        accelerator: joins the processes.
    """

    def __init__(
        self, prompts: PromptStream, function: PromptsFunction, accelerator: Accelerator
    ) -> None:
        self._prompts = prompts
        self._function = function
        self._accelerator = accelerator
        self._next: list[Row | None] = []

    def take(self, count: int) -> list[Row]:
        """The next ``count`` rows."""
        planned, self._next = self._next[:count], self._next[count:]
        planned += [None] * (count - len(planned))
        drawn = iter(self._prompts.take(planned.count(None)))
        return [next(drawn) if row is None else row for row in planned]

    def rewrite(self, scored: Scored, totals: Tensor, group_size: int) -> None:
        """Asks the function, after a generation batch. Every process calls it.

        Args:
            scored: the batch.
            totals: (N,) rewards of all processes' completions; NaN where none applied.
            group_size: completions per prompt.

        Raises:
            ValueError: the function returns something else than one prompt per prompt.
            RuntimeError: it raised.
        """
        mine = [(rollout.row, rollout.completion) for rollout in scored.rollouts]
        everyone = gather_object(mine)
        rows = [row for row, _ in everyone[::group_size]]
        completions = [completion for _, completion in everyone]
        groups = [completions[i : i + group_size] for i in range(0, len(everyone), group_size)]
        means = totals.reshape(-1, group_size).nanmean(1).tolist()
        outcome: list[Any] = [None, None]
        if self._accelerator.is_main_process:
            try:
                outcome[0] = self._ask(rows, groups, means)
            except (ValueError, RuntimeError) as error:
                outcome[1] = error
        if self._accelerator.num_processes > 1:
            broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        self._next = outcome[0]

    def state(self) -> dict[str, Any]:
        """Where the dataset stands, and the rows that come before it."""
        return {"dataset": self._prompts.state(), "next": self._next}

    def restore(self, state: dict[str, Any]) -> None:
        self._prompts.restore(state["dataset"])
        self._next = state["next"]

    def _ask(
        self, rows: list[Row], completions: list[list[Any]], rewards: list[float]
    ) -> list[Row | None]:
        prompts, others = copy.deepcopy([row["prompt"] for row in rows]), copy.deepcopy(rows)
        metas = [{k: v for k, v in row.items() if k != "prompt"} for row in others]
        try:
            answer = self._function(prompts, completions, rewards, metas)
        except Exception as error:
            raise RuntimeError(
                f"dynamic_prompts_fn raised {type(error).__name__}: {error}; it was called with "
                f"{len(rows)} prompts, the first of them {shortened(rows[0]['prompt'])}"
            ) from error
        if not isinstance(answer, list | tuple) or len(answer) != len(rows):
            got = len(answer) if isinstance(answer, list | tuple) else type(answer).__name__
            raise ValueError(
                f"dynamic_prompts_fn: expected a list of {len(rows)} prompts, one per prompt, "
                f"got {got}"
            )
        return [_next_row(row, prompt) for row, prompt in zip(rows, answer, strict=True)]


def _next_row(row: Row, prompt: Any) -> Row | None:
    if prompt is None:
        return None
    text = isinstance(row["prompt"], str)
    messages = isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)
    if not (isinstance(prompt, str) if text else messages):
        raise ValueError(
            f"dynamic_prompts_fn: expected {'text' if text else 'messages'} or None, as the "
            f"prompt is that it replaces, got {shortened(prompt)}"
        )
    new = row | {"prompt": prompt}
    for name, value in new.items():
        if not _is_plain(value):
            raise ValueError(
                "dynamic_prompts_fn: expected columns of numbers, text, lists and dictionaries, "
                f"which a checkpoint can hold, got {type(value).__name__} in {name!r}"
            )
    return new


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    return type(value) in _PLAIN


def training_prompts(
    dataset: Any, args: GRPOConfig, accelerator: Accelerator
) -> PromptStream | Curriculum:
    """What ``args`` asks for.

    Raises:
        ValueError: ``dynamic_prompts_fn`` leads to no function.
    """
    prompts = PromptStream.for_training(dataset, args)
    function = args.dynamic_prompts_fn
    if function is None:
        return prompts
    if isinstance(function, str):
        function = load_function(function, "dynamic_prompts_fn")
    return Curriculum(prompts, function, accelerator)
