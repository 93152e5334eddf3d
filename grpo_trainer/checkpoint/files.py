"""Checkpoints and models that are whole or not there: written aside, then renamed."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from grpo_trainer.checkpoint.manifest import write_manifest
from grpo_trainer.monitor import CARD_NAME

logger = logging.getLogger(__name__)

SETTINGS_FILE = "grpo_settings.json"
_INCOMPLETE = "incomplete-"  # no tool takes a folder of such a name for a checkpoint
_REPLACED = "-replaced"
# without these nobody takes a folder for a model
_ENTRIES = ("config.json", "adapter_config.json")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class CheckpointError(RuntimeError):
    """A checkpoint or a model could not be written."""


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")


@contextmanager
def written_aside(run_dir: Path, name: str, accelerator: Accelerator) -> Iterator[Path]:
    """Yield a folder for all processes to write ``name``, which then appears in ``run_dir``, whole.

    Raises:
        CheckpointError: a file could not be written. What was written is deleted, to free the disk;
            earlier checkpoints are untouched.
    """
    aside = run_dir / f"{_INCOMPLETE}{name}"
    if accelerator.is_local_main_process:
        shutil.rmtree(aside, ignore_errors=True)  # of a run that was ended while it wrote
    accelerator.wait_for_everyone()
    with _freed(aside, run_dir / name):
        (aside / name).mkdir(parents=True, exist_ok=True)
        yield aside
        accelerator.wait_for_everyone()  # some writers rename files of theirs
        _flush(aside / name)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _publish(aside, run_dir / name)
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process and (aside / name).exists():
            _publish(aside, run_dir / name)  # of a machine with a disk of its own


def delete_unfinished(run_dir: Path) -> None:
    """Free the disk of what runs left that were ended while they wrote or deleted a checkpoint.

    One that was about to be replaced comes back.
    """
    for folder in run_dir.glob(f"{_INCOMPLETE}*{_REPLACED}"):
        final = run_dir / folder.name.removeprefix(_INCOMPLETE).removesuffix(_REPLACED)
        if not final.exists():
            folder.rename(final)
    for folder in sorted(run_dir.glob(f"{_INCOMPLETE}{PREFIX_CHECKPOINT_DIR}-*")):
        logger.warning("%s is an unfinished checkpoint and is deleted", folder)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def model_aside(folder: Path) -> Iterator[Path]:
    """Yield a folder in which to save a model, which on leaving replaces the one in ``folder``.

    Raises:
        CheckpointError: a file could not be written. What is in ``folder`` is untouched.
    """
    aside = folder / f"{_INCOMPLETE}model"
    shutil.rmtree(aside, ignore_errors=True)
    with _freed(aside, folder):
        aside.mkdir(parents=True)
        if (folder / CARD_NAME).is_file():  # an edited one stays, and peft adds its lines to it
            shutil.copy(folder / CARD_NAME, aside)
        yield aside
        if (folder / CARD_NAME).is_dir():
            (aside / CARD_NAME).unlink(missing_ok=True)
        _flush(aside)
    _replace(aside, folder)


@contextmanager
def _freed(aside: Path, final: Path) -> Iterator[None]:
    """Delete what was written aside if it cannot be completed, and say so."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk has all three names
        run_dir = aside.parent
        there = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
        free = shutil.disk_usage(there).free
        shutil.rmtree(aside, ignore_errors=True)
        kept = ", ".join(folder.name for folder in checkpoints(run_dir)) or "none"
        raise CheckpointError(
            f"{final} could not be written: {error} ({free / 2**20:.1f} MiB were free). "
            f"Checkpoints there: {kept}"
        ) from error


def rotate(run_dir: Path, limit: int | None, keep: set[str | None]) -> None:
    """Delete the oldest complete checkpoints beyond ``limit``, none of those named in ``keep``."""
    if not limit or limit < 1:
        return
    # an incomplete one is no reason to delete a complete one
    folders = [folder for folder in checkpoints(run_dir) if (folder / TRAINER_STATE_NAME).exists()]
    spare = [folder for folder in folders if folder.name not in keep]
    for folder in spare[: max(len(folders) - limit, 0)]:
        # a run that is ended meanwhile leaves nothing that looks like a checkpoint
        doomed = folder.with_name(f"{_INCOMPLETE}{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _publish(aside: Path, final: Path) -> None:
    _sync(write_manifest(aside / final.name))
    replaced = final.with_name(f"{_INCOMPLETE}{final.name}{_REPLACED}")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():  # written again, by a run that started over
        final.rename(replaced)
    (aside / final.name).rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    aside.rmdir()
    _sync(final.parent)


def _replace(aside: Path, folder: Path) -> None:
    """Move the files of ``aside``. At no time is there a model of new and of old files."""
    names = [path.relative_to(aside) for path in aside.rglob("*") if path.is_file()]
    names.sort(key=lambda name: name.name in _ENTRIES)  # last
    for name in names:
        if name.name in _ENTRIES:
            (folder / name).unlink(missing_ok=True)
    if any(_WEIGHTS.fullmatch(str(name)) for name in names):
        for old in folder.iterdir():  # of another number of files, and read in place of the new
            if _WEIGHTS.fullmatch(old.name) and Path(old.name) not in names:
                old.unlink()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).replace(folder / name)
    shutil.rmtree(aside)
    _sync(folder)


def _flush(folder: Path) -> None:
    """Wait until the disk has it all: a rename could outlive a crash that the data does not."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(run_dir: Path) -> list[Path]:
    """Return folders that look like checkpoints, oldest step first."""
    found = {}
    for folder in run_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if step.isdigit() and folder.is_dir():
            found[int(step)] = folder
    return [found[step] for step in sorted(found)]


def models(folder: Path) -> list[Path]:
    """Return the files by which ``folder`` is taken for a model."""
    return [folder / name for name in _ENTRIES if (folder / name).exists()]
