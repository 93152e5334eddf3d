"""Tables of completions for the trackers that show tables: W&B and trackio."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.image_utils import load_image

from grpo_trainer.common import unfailing

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
