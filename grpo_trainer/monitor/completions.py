"""Sample completions: printed, and written to parquet, when metrics are logged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow
import torch
from accelerate.utils import gather_object
from pyarrow import parquet
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState

from grpo_trainer.common import encodable, printable, unfailing
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import Scored, data_url
from grpo_trainer.monitor.charts import REWARD_PREFIX

Rows = Sequence[Mapping[str, Any]]

# reward functions may add columns; the rewards' columns are rewards/NAME
IMAGES = "images"  # of the prompt and of tools' answers, as data URLs
OWN_COLUMNS = (
    "step", "prompt", IMAGES, "completion", "tokens", "truncated", "reward", "advantage",
)  # fmt: skip
EVAL_PREFIX = "eval_"  # of the files of evaluations

_TEXTS = {"prompt": 2, "completion": 3}  # column -> relative width when printed
_NOT_PRINTED = ("tokens", "truncated", "step", IMAGES)
_SHOWN_CHARACTERS = 300
_SIDE = 64  # largest side of an image, in pixels


class CompletionLog(TrainerCallback):
    """Collects rows of (prompt, completion, rewards, advantage) between two log calls, for training
    and evaluations, then prints and writes them. A run that starts over moves an earlier run's rows
    aside."""

    def __init__(self, args: GRPOConfig) -> None:
        self._args = args
        self._folder = Path(args.output_dir) / "completions"
        self._rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}  # by: is it training

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._control = control
        if state.global_step == 0 and state.is_world_process_zero:
            self._set_earlier_aside()

    def on_log(
        self, args: Any, state: TrainerState, *_: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        if "loss" in logs or "train_loss" in logs:
            self._flush(state, training=True)
        elif any(name.endswith("_runtime") for name in logs):  # an evaluation's row
            self._flush(state, training=False)

    def on_save(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_training_stop:  # the checkpoint does not hold rows
            self._flush(state, training=True)

    def on_predict(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self._flush(state, training=False)

    def clear(self) -> None:
        """Drop rows that are not written yet."""
        self._rows = {True: [], False: []}

    def add(self, batch: Scored, reward_names: Sequence[str], training: bool) -> None:
        """Add a row for each completion of this process."""
        advantages = batch.compared.advantages[batch.own]
        if advantages.dim() == 2:  # show the mean over a completion's tokens
            lengths = [len(sample.completion_ids) for sample in batch.samples]
            advantages = advantages.sum(1) / torch.tensor(lengths, device=advantages.device)
        names = [*(f"{REWARD_PREFIX}{name}" for name in reward_names), "reward", "advantage"]
        rewards = [*batch.rewards[batch.own].T, batch.compared.rewards[batch.own]]
        columns = dict(zip(names, torch.stack([*rewards, advantages]).tolist(), strict=True))
        with unfailing(f"completions in {self._folder}"):
            for index, sample in enumerate(batch.samples):
                row = {
                    "prompt": encodable(_as_text(sample.prompt)),
                    "completion": encodable(_as_text(sample.completion)),
                    "tokens": len(sample.completion_ids),
                    "truncated": bool(sample.truncated),
                }
                media = sample.images if self._args.log_multimodal else None
                if media is not None and media.images:
                    small = [image.copy() for image in media.images]
                    for image in small:
                        image.thumbnail((_SIDE, _SIDE))
                    row[IMAGES] = [data_url(image) for image in small]
                row |= {name: values[index] for name, values in columns.items()}
                self._rows[training].append(row | sample.extra)

    def state(self) -> list[dict[str, Any]]:
        """Return the training rows that are not written when the run ends."""
        return [] if self._control.should_training_stop else list(self._rows[True])

    def restore(self, state: list[dict[str, Any]]) -> None:
        self._rows[True] = list(state)

    def _set_earlier_aside(self) -> None:
        """Move an earlier run's completions to ``completions-1``, or the first free number; with
        ``overwrite_output_dir``, delete them."""
        folder = self._folder
        if self._args.overwrite_output_dir:
            for file in folder.glob("*completions_*.parquet"):
                file.unlink()
        elif folder.is_dir() and any(folder.iterdir()):
            names = (folder.with_name(f"{folder.name}-{number}") for number in count(1))
            folder.rename(next(name for name in names if not name.exists()))

    def _flush(self, state: TrainerState, training: bool) -> None:
        """Print and write the rows, on the main process; all processes call it."""
        rows = gather_object(self._rows[training])
        self._rows[training] = []
        if not state.is_world_process_zero or not rows:
            return
        step, name = state.global_step, f"{'' if training else EVAL_PREFIX}completions"
        if self._args.log_unique_prompts:  # keep each prompt's first completion
            firsts = {(row["prompt"], *row.get(IMAGES, ())): row for row in reversed(rows)}
            rows = list(firsts.values())[::-1]
        to_print = self._args.num_completions_to_print
        if to_print != 0:
            with unfailing(f"printing the completions of {self._folder}"):
                title = f"{name.replace('_', ' ')} at step {step}"
                Console().print(completion_table(rows[:to_print], title))
        with unfailing(f"completions in {self._folder}"):
            columns = {each: _column([row.get(each) for row in rows]) for each in _names(rows)}
            table = pyarrow.table(columns | {"step": [step] * len(rows)})
            if "wandb" in self._args.report_to:
                with unfailing("the table of completions for wandb"):
                    _to_wandb(name, table, step)
            self._folder.mkdir(parents=True, exist_ok=True)
            parquet.write_table(table, self._folder / f"{name}_{step:05d}.parquet")


def _to_wandb(name: str, table: pyarrow.Table, step: int) -> None:
    import wandb

    if wandb.run is not None:
        names = [column for column in table.column_names if column != IMAGES]
        data = [[row[column] for column in names] for row in table.to_pylist()]
        shown = wandb.Table(columns=names, data=data, allow_mixed_types=True)
        wandb.log({name: shown, "train/global_step": step})


def completion_table(rows: Rows, title: str) -> Table:
    """Return a row per completion: texts, rewards, and the columns that reward functions logged."""
    table = Table(title=title, title_justify="left", show_lines=True)
    names = [name for name in _names(rows) if name not in _NOT_PRINTED]
    for name in names:
        table.add_column(
            Text(name.removeprefix(REWARD_PREFIX)),
            justify="left" if name in _TEXTS else "right",
            overflow="fold",
            ratio=_TEXTS.get(name),
        )
    for row in rows:
        table.add_row(*(_cell(name, row.get(name)) for name in names))
    return table


def _cell(name: str, value: Any) -> Text:
    if value is None or value != value:
        return Text("-", style="dim")
    if name == "advantage":
        return Text(f"{value:+.2f}", style="green" if value > 0 else "red" if value < 0 else "dim")
    if isinstance(value, float):
        return Text(f"{value:.3g}")
    text = str(value)
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return Text(printable(cut))  # a Text, so that brackets are not markup


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))  # processes may differ


def _column(values: list[Any]) -> pyarrow.Array:
    """Return an array of one type, or of text if the values have no common type."""
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError):
        return pyarrow.array([None if value is None else str(value) for value in values])


def _as_text(value: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt or a completion as text, with messages below each other."""
    if isinstance(value, str):
        return value
    shown = []
    for message in value:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [_part(part) for part in content]
        parts += [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ()]
        shown.append(f"{message['role']}: " + "\n".join(part for part in parts if part))
    return "\n".join(shown)


def _part(part: Mapping[str, Any]) -> str:
    known = {"text": part.get("text"), "image": "[image]"}.get(part.get("type", ""))
    return known or json.dumps(part, ensure_ascii=False, default=str)
