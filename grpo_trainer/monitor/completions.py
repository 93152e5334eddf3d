"""The completions behind the numbers: printed and written to parquet when metrics are logged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow
from accelerate.utils import gather_object
from huggingface_hub import CommitScheduler
from huggingface_hub.utils import HfHubHTTPError
from PIL.Image import Image
from pyarrow import parquet
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.image_utils import load_image

from grpo_trainer.common import encodable, printable, unfailing
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import Rollout, data_url

Rows = Sequence[Mapping[str, Any]]


def log_table(trackers: Sequence[str], name: str, rows: Rows, images: str, step: int) -> None:
    """Log ``rows`` as a table to each of ``trackers`` that has begun a run.

    ``images`` is the column of data URLs.
    """
    for tracker in trackers:
        if tracker in _TRACKERS:
            with unfailing(f"the table of completions for {tracker}"):
                _TRACKERS[tracker](name, rows, images, step)


def _to_wandb(name: str, rows: Rows, images: str, step: int) -> None:
    import wandb

    if wandb.run is None:
        return
    shown = [_row(row, images, wandb.Image) for row in rows]
    names = dict.fromkeys(name for row in shown for name in row)
    columns = [_of_one_type([row.get(name) for row in shown]) for name in names]
    table = wandb.Table(columns=list(names), data=list(zip(*columns, strict=True)))
    wandb.log({name: table}, commit=False)  # the metrics of this step follow, and end it


def _to_trackio(name: str, rows: Rows, images: str, step: int) -> None:
    import trackio

    if trackio.context_vars.current_run.get() is None:
        return
    shown = [_row(row, images, trackio.Image) for row in rows]
    trackio.log({name: trackio.Table(data=shown), "train/global_step": step})


_TRACKERS: dict[str, Callable[[str, Rows, str, int], None]] = {
    "wandb": _to_wandb,
    "trackio": _to_trackio,
}


def _row(row: Mapping[str, Any], images: str, image: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a row of plain values, each image in a column of its own."""
    shown = {f"image {i}": image(load_image(url)) for i, url in enumerate(row.get(images, ()), 1)}
    plain = {name: _plain(value) for name, value in row.items() if name != images}
    return {"prompt": plain.pop("prompt"), **shown, **plain}


def _of_one_type(values: list[Any]) -> list[Any]:
    """Return them as text if they have no type in common, which a table of W&B refuses."""
    kinds = {float if type(value) is int else type(value) for value in values if value is not None}
    if len(kinds) < 2:
        return values
    return [None if value is None else str(value) for value in values]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# reward functions may add others; those of the rewards are called rewards/NAME
IMAGES = "images"  # of the prompt and of what tools answered, as data URLs
OWN_COLUMNS = (
    "step", "prompt", IMAGES, "completion", "tokens", "truncated", "reward", "advantage",
)  # fmt: skip
REWARD_PREFIX = "rewards/"
EVAL_PREFIX = "eval_"  # of the files of evaluations


_SHOWN_CHARACTERS = 300
_SIDE = 64  # pixels of an image at most
_MINUTES = 2  # from one upload to the next
# OSError, and what the hub's HTTP client raises where there is no connection
_HUB_ERRORS = tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))


@dataclass(kw_only=True)
class CompletionLog:
    """Collects rows of (prompt, completion, rewards, advantage) between two log calls."""

    folder: Path  # where the files go
    to_print: int | None  # how many rows; None: all
    unique_prompts: bool  # keep one completion of each prompt only
    images: bool = True  # keep small copies of those of prompts
    prefix: str = ""  # of the files' names
    trackers: Sequence[str] = ()  # that show tables
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, rollouts: Sequence[Rollout], columns: Mapping[str, Sequence[Any]]) -> None:
        """Add a row per completion; ``columns`` are its rewards and its advantage."""
        with unfailing(f"completions in {self.folder}"):
            for index, rollout in enumerate(rollouts):
                row = {
                    "prompt": encodable(as_text(rollout.prompt)),
                    "completion": encodable(as_text(rollout.completion)),
                    "tokens": len(rollout.completion_ids),
                    "truncated": bool(rollout.truncated),
                }
                if self.images and rollout.images is not None and rollout.images.images:
                    row[IMAGES] = [_small(image) for image in rollout.images.images]
                row |= {name: values[index] for name, values in columns.items()}
                self.rows.append(row | rollout.extra)

    def state(self) -> list[dict[str, Any]]:
        """Return the rows that are not written yet."""
        return list(self.rows)

    def restore(self, state: list[dict[str, Any]]) -> None:
        self.rows = list(state)

    def flush(self, step: int, is_main_process: bool) -> None:
        """Print and write the rows, on the main process; all processes call it."""
        rows = gather_object(self.rows)
        self.rows = []
        if not is_main_process or not rows:
            return
        if self.unique_prompts:  # the first completion of each
            firsts = {(row["prompt"], *row.get(IMAGES, ())): row for row in reversed(rows)}
            rows = list(firsts.values())[::-1]
        if self.to_print != 0:
            with unfailing(f"printing the completions of {self.folder}"):
                title = f"{self.prefix.replace('_', ' ')}completions at step {step}"
                Console().print(completion_table(rows[: self.to_print], title))
        log_table(self.trackers, f"{self.prefix}completions", rows, IMAGES, step)
        with unfailing(f"completions in {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{self.prefix}completions_{step:05d}.parquet"
            parquet.write_table(_parquet_table(rows, step), path)


def completion_logs(args: GRPOConfig) -> dict[bool, CompletionLog]:
    """Return those of training (True) and of evaluation (False); none unless they are asked for."""
    if not args.log_completions:
        return {}
    folder = completions_folder(args)
    training = CompletionLog(
        folder=folder,
        to_print=args.num_completions_to_print,
        unique_prompts=args.log_unique_prompts,
        images=args.log_multimodal,
        trackers=args.report_to,
    )
    return {True: training, False: replace(training, prefix=EVAL_PREFIX, rows=[])}


def completion_uploads(args: GRPOConfig) -> CommitScheduler | None:
    """Return what uploads their files to the hub, now and then and at the end; None: nothing does.

    Raises:
        ValueError: there can be no such repository.
    """
    repository = args.log_completions_hub_repo
    if repository is None:
        return None
    try:
        return CommitScheduler(
            repo_id=repository,
            repo_type="dataset",
            folder_path=completions_folder(args),
            every=_MINUTES,
            private=args.hub_private_repo,
            token=args.hub_token,
            allow_patterns="*.parquet",
        )
    except _HUB_ERRORS as error:
        raise ValueError(f"log_completions_hub_repo: cannot use {repository!r}: {error}") from error


def completions_folder(args: GRPOConfig) -> Path:
    """Return where the files are written."""
    return Path(args.output_dir) / "completions"


def completion_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return a row per completion: texts, rewards, and what reward functions logged beside them."""
    table = Table(title=title, title_justify="left", show_lines=True)
    left_out = ("tokens", "truncated", "step", IMAGES)
    names = [name for name in _names(rows) if name not in left_out]
    for name in names:
        is_text = name in ("prompt", "completion")
        table.add_column(
            Text(name.removeprefix(REWARD_PREFIX)),
            justify="left" if is_text else "right",
            overflow="fold",
            ratio={"prompt": 2, "completion": 3}.get(name),
        )
    for row in rows:
        table.add_row(*(_cell(name, row.get(name)) for name in names))
    return table


def _parquet_table(rows: Sequence[Mapping[str, Any]], step: int) -> pyarrow.Table:
    columns = {name: _column([row.get(name) for row in rows]) for name in _names(rows)}
    return pyarrow.table(columns | {"step": [step] * len(rows)})


def _column(values: list[Any]) -> pyarrow.Array:
    """Return an array of one type; of text if the values have none in common."""
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError):
        return pyarrow.array([None if value is None else str(value) for value in values])


def as_text(value: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt or a completion as it is shown: messages one below the other."""
    if isinstance(value, str):
        return value
    return "\n".join(f"{message['role']}: {_content(message)}" for message in value)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [_part(part) for part in content]
    parts += [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in parts if part)


def _part(part: Mapping[str, Any]) -> str:
    known = {"text": part.get("text"), "image": "[image]"}.get(part.get("type", ""))
    return known or json.dumps(part, ensure_ascii=False, default=str)


def _small(image: Image) -> str:
    """Return a data URL of a small copy."""
    copy = image.copy()
    copy.thumbnail((_SIDE, _SIDE))
    return data_url(copy)


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))  # processes may differ


def _cell(name: str, value: Any) -> Text:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Text("-", style="dim")
    if name == "advantage":
        return Text(f"{value:+.2f}", style="green" if value > 0 else "red" if value < 0 else "dim")
    if isinstance(value, float):
        return Text(f"{value:.3g}")
    text = str(value)
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return Text(printable(cut))  # a Text: brackets in it are no markup
