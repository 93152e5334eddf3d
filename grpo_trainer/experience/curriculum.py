"""A curriculum: a function of the user's decides which prompts come next."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from grpo_trainer.common import load_function, message_of, shortened
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import DatasetRow, Prompt, PromptStream, Row, Sample, prompt_columns
from grpo_trainer.engines import on_first_process

# (prompts, completions, rewards, metas) -> prompts of the next generation batch
PromptsFunction: TypeAlias = Callable[
    [list[Prompt], list[Any], list[float], list[dict[str, Any]]], Sequence[Prompt | None]
]

_PLAIN = (type(None), bool, int, float, str, Tensor)


class Curriculum:
    """Training prompts, of which a function writes those of the next generation batch.

    After each generation batch of training, when it is scored, the function is asked, and says for
    each prompt which one takes its place in the next batch, with the columns of the same row; where
    it says none, the dataset's next row does.

    The function runs on the main process only; all others take over what it returns. What it has
    returned is in a checkpoint; what it remembers by itself is not.

    Args:
        prompts: the dataset's.
        function: the function.
        accelerator: joins the processes.
        form: what the function has an entry for: ``samples``, or ``groups`` of them.
    """

    def __init__(
        self,
        prompts: PromptStream,
        function: PromptsFunction,
        accelerator: Accelerator,
        form: str = "samples",
    ) -> None:
        self._prompts = prompts
        self._function = function
        self._accelerator = accelerator
        self._form = form
        self._next: list[DatasetRow | None] = []

    def take(self, count: int) -> list[Row]:
        """Return the next ``count`` rows."""
        planned: list[Row | None] = [*self._next[:count]]
        self._next = self._next[count:]
        planned += [None] * (count - len(planned))
        drawn = iter(self._prompts.take(planned.count(None)))
        return [next(drawn) if row is None else row for row in planned]

    def rewrite(self, samples: Sequence[Sample], totals: Tensor, group_size: int) -> None:
        """Ask the function, after a generation batch. Every process calls it.

        Args:
            samples: this process's completions; those of a prompt are in a row.
            totals: (N,) rewards of all processes' completions; NaN where none applied.
            group_size: completions per prompt.

        Raises:
            ValueError: the function returns something else than it should.
            RuntimeError: it raised.
        """
        mine = [(sample.row, sample.completion) for sample in samples]
        rows, completions = map(list, zip(*gather_object(mine), strict=True))
        asked = self._asked
        self._next = on_first_process(
            self._accelerator, False, lambda _: asked(rows, completions, totals, group_size)
        )

    def state(self) -> dict[str, Any]:
        """Return where the dataset stands, and the rows that come before it."""
        rows = [row and {"row": dict(row), "original": row.original} for row in self._next]
        return {"dataset": self._prompts.state(), "next": rows}

    def restore(self, state: dict[str, Any]) -> None:
        self._prompts.restore(state["dataset"])
        self._next = [row and DatasetRow(**row) for row in state["next"]]

    def _asked(
        self, rows: list[Row], completions: list[Any], totals: Tensor, size: int
    ) -> list[DatasetRow | None]:
        """Ask with one entry per sample, or per prompt, and return the next row of each prompt."""
        firsts = rows[::size]
        if self._form == "groups":  # each prompt as it was completed: its completions, their mean
            prompts = [row["prompt"] for row in firsts]
            metas = [{name: row[name] for name in row if name != "prompt"} for row in firsts]
            means = totals.reshape(-1, size).nanmean(1).tolist()
            answer = self._answer(firsts, prompts, _groups(completions, size), means, metas)
            return [_rewritten(*pair) for pair in zip(firsts, answer, strict=True)]
        # What most samples of a prompt got is trained on next, once: after that, or where it is the
        # dataset's own, the dataset goes on.
        originals = [_original(row) for row in rows]
        metas = [dict(row) for row in rows]
        answer = self._answer(rows, originals, completions, totals.tolist(), metas)
        next_rows: list[DatasetRow | None] = []
        for row, group in zip(firsts, _groups(answer, size), strict=True):
            prompt = max(group, key=group.count)  # of equally many the first
            over = getattr(row, "original", None) is not None or prompt == _original(row)
            next_rows.append(None if over else _rewritten(row, prompt))
        return next_rows

    def _answer(self, rows: list[Row], *columns: list[Any]) -> list[Prompt | None]:
        """Ask the function, which may change what it is given, and check what it returns."""
        # entry by entry, since completions of a prompt share its row
        prompts, completions, rewards, metas = [[*map(copy.deepcopy, column)] for column in columns]
        try:
            answer = self._function(prompts, completions, rewards, metas)
        except Exception as error:
            raise RuntimeError(
                f"dynamic_prompts_fn raised {type(error).__name__}: {message_of(error)}; it was "
                f"called with {len(rows)} prompts, the first of them {shortened(rows[0]['prompt'])}"
            ) from error
        if not isinstance(answer, list | tuple) or len(answer) != len(rows):
            got = len(answer) if isinstance(answer, list | tuple) else type(answer).__name__
            raise ValueError(
                f"dynamic_prompts_fn: expected a list of {len(rows)} prompts, one per prompt that "
                f"it was given, got {got}"
            )
        for row, prompt in zip(rows, answer, strict=True):
            text = isinstance(row["prompt"], str)
            messages = (
                isinstance(prompt, list) and prompt and all(isinstance(one, dict) for one in prompt)
            )
            if prompt is not None and not (isinstance(prompt, str) if text else messages):
                raise ValueError(
                    f"dynamic_prompts_fn: expected {'text' if text else 'messages'} or None, as "
                    f"the prompt is that it replaces, got {shortened(prompt)}"
                )
        return list(answer)


def _groups(column: list[Any], size: int) -> list[list[Any]]:
    """Return the entries of each prompt."""
    return [column[i : i + size] for i in range(0, len(column), size)]


def _original(row: Row) -> Prompt:
    """Return the dataset's prompt of a row, which may have another one."""
    original = getattr(row, "original", None)
    return row["prompt"] if original is None else original


def _rewritten(row: Row, prompt: Prompt | None) -> DatasetRow | None:
    if prompt is None:
        return None
    new = DatasetRow({**row, "prompt": prompt}, original=_original(row))
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
        return _is_plain([*value.keys(), *value.values()])
    return type(value) in _PLAIN


def training_prompts(
    dataset: Any, args: GRPOConfig, accelerator: Accelerator
) -> PromptStream | Curriculum:
    """Return what ``args`` asks for.

    Raises:
        ValueError: ``dynamic_prompts_fn`` leads to no function.
    """
    if args.remove_unused_columns:
        dataset = dataset.select_columns(prompt_columns(dataset))
    seed = args.seed if args.shuffle_dataset else None
    prompts = PromptStream(dataset, args.prompts_per_generation, seed)
    function = args.dynamic_prompts_fn
    if function is None:
        return prompts
    if isinstance(function, str):
        function = load_function(function, "dynamic_prompts_fn")
    return Curriculum(prompts, function, accelerator, args.dynamic_prompts_form)
