"""A curriculum: a function of the user's decides which prompts come next."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from grpo_trainer.common import load_function, shortened
from grpo_trainer.config import PROMPT_FORMS, GRPOConfig
from grpo_trainer.data import Prompt, PromptStream, Row, Sample, prompt_columns

# (prompts, completions, rewards, metas) -> prompts of the next generation batch
PromptsFunction: TypeAlias = Callable[
    [list[Prompt], list[Any], list[float], list[dict[str, Any]]], Sequence[Prompt | None]
]

_PLAIN = (type(None), bool, int, float, str, Tensor)


class Rewritten(dict[str, Any]):
    """A row with another prompt than the dataset has for it, which is ``original``."""

    def __init__(self, row: Row, original: Prompt) -> None:
        super().__init__(row)
        self.original = original

    def __reduce__(self) -> tuple[Any, ...]:
        return Rewritten, (dict(self), self.original)


class Batch(NamedTuple):
    """A scored generation batch of all processes; the samples of a prompt are in a row."""

    rows: list[Row]  # N
    completions: list[Any]  # N
    rewards: Tensor  # (N,) NaN where none applied
    group_size: int

    def groups(self, column: list[Any]) -> list[list[Any]]:
        """Return the entries of each prompt."""
        size = self.group_size
        return [column[i : i + size] for i in range(0, len(column), size)]


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
        form: one of PROMPT_FORMS: what the function has an entry for.
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
        self._ask = _ASK[form]
        self._next: list[Rewritten | None] = []

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
            samples: this process's completions.
            totals: (N,) rewards of all processes' completions; NaN where none applied.
            group_size: completions per prompt.

        Raises:
            ValueError: the function returns something else than it should.
            RuntimeError: it raised.
        """
        mine = [(sample.row, sample.completion) for sample in samples]
        rows, completions = zip(*gather_object(mine), strict=True)
        outcome: list[Any] = [None, None]
        if self._accelerator.is_main_process:
            batch = Batch(list(rows), list(completions), totals, group_size)
            try:
                outcome[0] = self._ask(self._function, batch)
            except (ValueError, RuntimeError) as error:
                outcome[1] = error
        if self._accelerator.num_processes > 1:
            broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        self._next = outcome[0]

    def state(self) -> dict[str, Any]:
        """Return where the dataset stands, and the rows that come before it."""
        rows = [row and {"row": dict(row), "original": row.original} for row in self._next]
        return {"dataset": self._prompts.state(), "next": rows}

    def restore(self, state: dict[str, Any]) -> None:
        self._prompts.restore(state["dataset"])
        self._next = [row and Rewritten(**row) for row in state["next"]]


def _by_sample(function: PromptsFunction, batch: Batch) -> list[Rewritten | None]:
    """Ask with one entry per sample, and the dataset's prompts.

    What most samples of a prompt got is trained on next, once: after that, or where it is the
    dataset's own, the dataset goes on.
    """
    rows = batch.rows
    metas = [dict(row) for row in rows]
    prompts = _answer(
        function, ([*map(_original, rows)], batch.completions, batch.rewards.tolist(), metas), rows
    )
    next_rows: list[Rewritten | None] = []
    for row, group in zip(rows[:: batch.group_size], batch.groups(prompts), strict=True):
        prompt = max(group, key=group.count)  # of equally many the first
        over = isinstance(row, Rewritten) or prompt == _original(row)
        next_rows.append(None if over else _rewritten(row, prompt))
    return next_rows


def _by_group(function: PromptsFunction, batch: Batch) -> list[Rewritten | None]:
    """Ask with one entry per prompt, as it was completed: its completions, their mean reward."""
    rows = batch.rows[:: batch.group_size]
    prompts = [row["prompt"] for row in rows]
    metas = [{name: value for name, value in row.items() if name != "prompt"} for row in rows]
    means = batch.rewards.reshape(-1, batch.group_size).nanmean(1).tolist()
    answer = _answer(function, (prompts, batch.groups(batch.completions), means, metas), rows)
    return [_rewritten(*pair) for pair in zip(rows, answer, strict=True)]


_ASK = dict(zip(PROMPT_FORMS, (_by_sample, _by_group), strict=True))


def _answer(
    function: PromptsFunction, columns: tuple[list[Any], ...], rows: list[Row]
) -> list[Prompt | None]:
    """Ask the function, which may change what it is given, and check what it returns."""
    # entry by entry, since completions of a prompt share its row
    prompts, completions, rewards, metas = [[*map(copy.deepcopy, column)] for column in columns]
    try:
        answer = function(prompts, completions, rewards, metas)
    except Exception as error:
        raise RuntimeError(
            f"dynamic_prompts_fn raised {type(error).__name__}: {error}; it was called with "
            f"{len(rows)} prompts, the first of them {shortened(rows[0]['prompt'])}"
        ) from error
    if not isinstance(answer, list | tuple) or len(answer) != len(rows):
        got = len(answer) if isinstance(answer, list | tuple) else type(answer).__name__
        raise ValueError(
            f"dynamic_prompts_fn: expected a list of {len(rows)} prompts, one per prompt that it "
            f"was given, got {got}"
        )
    for row, prompt in zip(rows, answer, strict=True):
        _check_kind(row, prompt)
    return list(answer)


def _check_kind(row: Row, prompt: Any) -> None:
    text = isinstance(row["prompt"], str)
    messages = isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)
    if prompt is not None and not (isinstance(prompt, str) if text else messages):
        raise ValueError(
            f"dynamic_prompts_fn: expected {'text' if text else 'messages'} or None, as the "
            f"prompt is that it replaces, got {shortened(prompt)}"
        )


def _original(row: Row) -> Prompt:
    return row.original if isinstance(row, Rewritten) else row["prompt"]


def _rewritten(row: Row, prompt: Prompt | None) -> Rewritten | None:
    if prompt is None:
        return None
    new = Rewritten({**row, "prompt": prompt}, _original(row))
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
