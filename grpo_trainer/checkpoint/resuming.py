"""Which checkpoint a run resumes from, and whether it can go on from there exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from grpo_trainer.checkpoint.files import SETTINGS_FILE, checkpoints, models
from grpo_trainer.checkpoint.manifest import Manifest
from grpo_trainer.checkpoint.run_settings import differences, may_end_elsewhere
from grpo_trainer.config import GRPOConfig

_NAME = "resume_from_checkpoint"


def find_checkpoint(run_dir: Path, asked: str | Path | bool | None, overwrite: bool) -> Path | None:
    """Return the folder that ``asked`` means; for True the newest in ``run_dir``.

    Raises:
        ValueError: there is none; or, unless it is to ``overwrite`` them, ``run_dir`` holds a model
            or checkpoints of a run that does not go on.
    """
    found = _asked_for(run_dir, asked)
    goes_on = found is not None and found.resolve().parent == run_dir.resolve()
    kept = [path.name for path in (*models(run_dir), *checkpoints(run_dir))]
    if kept and not goes_on and not overwrite:
        raise ValueError(
            "output_dir: expected a folder without a model or checkpoints of another run, got "
            f"{str(run_dir)!r} with {kept[-1]}; choose another, go on from a checkpoint with "
            "resume_from_checkpoint, or write over what is there with overwrite_output_dir"
        )
    return found


def _asked_for(run_dir: Path, asked: str | Path | bool | None) -> Path | None:
    if asked is None or asked is False:
        return None
    if asked is not True:
        if not Path(asked).is_dir():
            raise ValueError(f"{_NAME}: expected a folder, got {str(asked)!r}")
        return Path(asked)
    found = checkpoints(run_dir)
    if not found:
        raise ValueError(f"{_NAME}: expected a checkpoint in output_dir {str(run_dir)!r}, got none")
    return found[-1]


def check_checkpoint(folder: Path, args: GRPOConfig, settings: dict[str, Any], steps: int) -> None:
    """Raise ValueError unless a run can go on from ``folder`` exactly. It reads every file.

    Args:
        folder: the checkpoint.
        args: of the run.
        settings: what the checkpoint must have been written with.
        steps: how many the run takes in all.
    """
    with _named(folder):
        manifest = Manifest(folder)
        manifest.check_sizes()
        if SETTINGS_FILE not in manifest:
            raise ValueError(f"{folder} has no {SETTINGS_FILE} (save_only_model leaves it out)")
        manifest.check_contents([SETTINGS_FILE, TRAINER_STATE_NAME])
    _check_settings(folder, args, settings, steps)
    with _named(folder):  # the large files, for which a wrong setting need not wait
        manifest.check_contents()


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Say which argument led to a checkpoint that is not whole, and where an older one is."""
    try:
        yield
    except (OSError, ValueError) as error:
        found = checkpoints(folder.parent)
        older = found[: found.index(folder)] if folder in found else []
        advice = f"; to go on from an older one, pass {str(older[-1])!r}" if older else ""
        raise ValueError(f"{_NAME}: expected a whole checkpoint, but {error}{advice}") from error


def _check_settings(folder: Path, args: GRPOConfig, settings: dict[str, Any], steps: int) -> None:
    written = json.loads((folder / SETTINGS_FILE).read_text())
    defaults = {item.name: item.default for item in fields(args)}
    wrong = differences(written, settings, defaults)
    if wrong:
        raise ValueError(
            f"{_NAME}: {folder} was written with {'; '.join(wrong)}, which cannot go on exactly; "
            "to train its model with other settings, pass the folder as the model of a new run"
        )
    before = json.loads((folder / TRAINER_STATE_NAME).read_text())["max_steps"]
    if not may_end_elsewhere(args, before, steps):
        schedule = settings["lr_scheduler_type"]
        raise ValueError(
            f"{_NAME}: {folder} is of a run of {before} steps, got max_steps or num_train_epochs "
            f"for {steps}: with lr_scheduler_type={schedule!r} the steps taken would have "
            "had other learning rates; a constant one lets a run become longer"
        )
