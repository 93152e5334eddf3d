"""A curriculum: the user's function chooses the next prompts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from accelerate import Accelerator
from accelerate.utils import gather_object

from grpo_trainer.common import load_function, message_of, shortened
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import DatasetRow, Prompt, PromptDataset, Row, Scored, check_plain
from grpo_trainer.engines import on_first_process
from grpo_trainer.experience.prompts import DatasetPrompts

# (prompts, completions, rewards, metas) -> prompts, one entry per completion in each list
PromptsFunction: TypeAlias = Callable[
    [list[Prompt], list[Any], list[float], list[dict[str, Any]]], Sequence[Prompt | None]
]


class Curriculum(DatasetPrompts):
    """Training prompts that a function can replace for the next generation batch.

    The function is called after each generation batch of training is scored. For each completion
    it returns a prompt that replaces the completion's prompt in the next batch, with the columns
    of the same row. The most frequent prompt of a group is trained on once; if it is None, or the
    dataset's own prompt, the dataset's next row is used instead.

    The function runs only on the main process; the others get its result. Checkpoints store what
    it returned, but not its own state.

    Args:
        dataset: rows with a ``prompt``.
        args: ``dynamic_prompts_fn`` is the function, or its import path.
        accelerator: connects the processes.

    Raises:
        ValueError: ``dynamic_prompts_fn`` is not a function. In ``scored``: the function returns
            something invalid.
        RuntimeError: in ``scored``: the function raised.
    """

    def __init__(self, dataset: PromptDataset, args: GRPOConfig, accelerator: Accelerator) -> None:
        super().__init__(dataset, args, accelerator)
        function: Any = args.dynamic_prompts_fn
        if isinstance(function, str):
            function = load_function(function, "dynamic_prompts_fn")
        self._function: PromptsFunction = function
        self._next: list[DatasetRow | None] = []

    def rows(self, count: int) -> list[Row]:
        planned: list[Row | None] = [*self._next[:count]]
        self._next = self._next[count:]
        planned += [None] * (count - len(planned))
        from_dataset = iter(super().rows(planned.count(None)))
        return [next(from_dataset) if row is None else row for row in planned]

    def scored(self, batch: Scored) -> None:
        mine = [(sample.row, sample.completion) for sample in batch.samples]
        rows, completions = map(list, zip(*gather_object(mine), strict=True))
        if None in rows:
            raise ValueError("dynamic_prompts_fn: expected samples with a row, got one without")
        totals = batch.compared.rewards.tolist()  # NaN if no reward applies
        self._next = on_first_process(
            self._accelerator, False, lambda _: self._planned(rows, completions, totals)
        )

    def state(self) -> dict[str, Any]:
        rows = [row and {"row": dict(row), "original": row.original} for row in self._next]
        return {"dataset": super().state(), "next": rows}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state["dataset"])
        self._next = [row and DatasetRow(**row) for row in state["next"]]

    def _planned(
        self, rows: list[Row], completions: list[Any], totals: list[float]
    ) -> list[DatasetRow | None]:
        """Call the function, and return the next row for each prompt."""
        answer = self._answer(rows, completions, totals)
        size = self._args.num_generations
        planned: list[DatasetRow | None] = []
        for start in range(0, len(rows), size):
            row, group = rows[start], answer[start : start + size]
            prompt = max(group, key=group.count)  # the first of several
            over = getattr(row, "original", None) is not None or prompt == _original(row)
            planned.append(None if over else _rewritten(row, prompt))
        return planned

    def _answer(
        self, rows: list[Row], completions: list[Any], totals: list[float]
    ) -> list[Prompt | None]:
        """Call the function, which may change its arguments, and check what it returns."""
        # copied one by one, since completions of a prompt share its row
        prompts = [copy.deepcopy(_original(row)) for row in rows]
        metas = [copy.deepcopy(dict(row)) for row in rows]
        texts = [copy.deepcopy(completion) for completion in completions]
        try:
            answer = self._function(prompts, texts, totals, metas)
        except Exception as error:
            raise RuntimeError(
                f"dynamic_prompts_fn raised {type(error).__name__}: {message_of(error)}; it was "
                f"called with {len(rows)} prompts, the first of them {shortened(rows[0]['prompt'])}"
            ) from error
        if not isinstance(answer, list | tuple) or len(answer) != len(rows):
            got = len(answer) if isinstance(answer, list | tuple) else type(answer).__name__
            raise ValueError(
                f"dynamic_prompts_fn: expected a list of {len(rows)} prompts, one per completion, "
                f"got {got}"
            )
        for row, prompt in zip(rows, answer, strict=True):
            text = isinstance(row["prompt"], str)
            messages = (
                isinstance(prompt, list) and prompt and all(isinstance(one, dict) for one in prompt)
            )
            if prompt is not None and not (isinstance(prompt, str) if text else messages):
                raise ValueError(
                    f"dynamic_prompts_fn: expected {'text' if text else 'messages'} or None, like "
                    f"the prompt that it replaces, got {shortened(prompt)}"
                )
        return list(answer)


def _original(row: Row) -> Prompt:
    """Return the dataset's prompt of a row, which may have been replaced."""
    original = getattr(row, "original", None)
    return row["prompt"] if original is None else original


def _rewritten(row: Row, prompt: Prompt | None) -> DatasetRow | None:
    if prompt is None:
        return None
    new = DatasetRow({**row, "prompt": prompt}, original=_original(row))
    for name, value in new.items():
        check_plain(f"dynamic_prompts_fn: column {name!r}", value)
    return new
