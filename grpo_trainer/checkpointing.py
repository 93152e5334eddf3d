"""Checkpoints that are whole or not there: written aside, then renamed."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

if TYPE_CHECKING:
    from grpo_trainer.config import GRPOConfig

logger = logging.getLogger(__name__)

SETTINGS_FILE = "grpo_settings.json"
_INCOMPLETE = "incomplete-"  # no tool takes a folder of such a name for a checkpoint

# fields of GRPOConfig that decide which completions are trained on when, or what a checkpoint holds
_SETTINGS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "steps_per_generation",
    "num_iterations",
    "seed",
    "shuffle_dataset",
    "dynamic_sampling",
    "use_adaptive_entropy",
    "sync_ref_model",
    "overlap_generation",
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written."""


def run_settings(args: GRPOConfig, train_dataset: Any) -> dict[str, Any]:
    """What a checkpoint and a run that resumes from it must agree on, by the name of the field."""
    prompts = len(train_dataset) if hasattr(train_dataset, "__len__") else None
    return {
        "number of processes": args.world_size,
        **{name: getattr(args, name) for name in _SETTINGS},
        "beta != 0": args.beta != 0,
        "a dynamic_prompts_fn": args.dynamic_prompts_fn is not None,
        "dynamic_prompts_form": args.dynamic_prompts_form if args.dynamic_prompts_fn else None,
        "rows of train_dataset": prompts,
    }


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")


def check_settings(checkpoint: Path, settings: dict[str, Any]) -> None:
    """Raises ValueError unless a run with ``settings`` can go on from ``checkpoint`` exactly."""
    if not checkpoint.is_dir():
        raise ValueError(f"resume_from_checkpoint: expected a folder, got {str(checkpoint)!r}")
    missing = _missing(checkpoint)
    if missing:
        raise ValueError(
            f"resume_from_checkpoint: expected a complete checkpoint of this trainer, "
            f"{checkpoint} has no {missing}"
        )
    written = json.loads((checkpoint / SETTINGS_FILE).read_text())
    for name, value in settings.items():
        if written.get(name) != value:
            raise ValueError(
                f"resume_from_checkpoint: {checkpoint} was written with {name} = "
                f"{written.get(name)}, got {value}, which cannot go on exactly; to train its "
                "model with other settings, pass the folder as the model of a new run"
            )


def last_checkpoint(run_dir: Path) -> Path:
    """The newest complete checkpoint. Incomplete ones are reported and passed over.

    Raises:
        ValueError: there is none.
    """
    report_incomplete(run_dir)
    for folder in reversed(_checkpoints(run_dir)):
        missing = _missing(folder)
        if not missing:
            return folder
        logger.warning("%s is ignored: it has no %s", folder, missing)
    raise ValueError(
        f"resume_from_checkpoint: expected a complete checkpoint in output_dir {str(run_dir)!r}, "
        "got none"
    )


def report_incomplete(run_dir: Path) -> None:
    """Warns of what a run left that was ended while it wrote or deleted a checkpoint."""
    for folder in sorted(run_dir.glob(f"{_INCOMPLETE}{PREFIX_CHECKPOINT_DIR}-*")):
        logger.warning("%s is an unfinished checkpoint and is ignored; it can be deleted", folder)


@contextmanager
def written_aside(run_dir: Path, name: str, accelerator: Accelerator) -> Iterator[Path]:
    """A folder in which all processes write ``name``; on leaving it appears in ``run_dir``, whole.

    Raises:
        CheckpointError: a file could not be written. What was written is deleted, to free the disk;
            earlier checkpoints are untouched.
    """
    aside = run_dir / f"{_INCOMPLETE}{name}"
    if accelerator.is_local_main_process:
        shutil.rmtree(aside, ignore_errors=True)  # of a run that was ended while it wrote
    accelerator.wait_for_everyone()
    try:
        (aside / name).mkdir(parents=True, exist_ok=True)
        yield aside
        _flush(aside / name)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _publish(aside, run_dir / name)
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process and (aside / name).exists():
            _publish(aside, run_dir / name)  # of a machine with a disk of its own
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk has all three names
        there = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
        free = shutil.disk_usage(there).free
        shutil.rmtree(aside, ignore_errors=True)
        kept = ", ".join(folder.name for folder in _checkpoints(run_dir)) or "none"
        raise CheckpointError(
            f"{run_dir / name} could not be written: {error} ({free / 2**20:.1f} MiB were free). "
            f"Checkpoints there: {kept}"
        ) from error


def rotate(run_dir: Path, limit: int | None, keep: set[str | None]) -> None:
    """Deletes the oldest complete checkpoints beyond ``limit``, none of those named in ``keep``."""
    if not limit or limit < 1:
        return
    # an incomplete one is no reason to delete a complete one
    folders = [folder for folder in _checkpoints(run_dir) if (folder / TRAINER_STATE_NAME).exists()]
    spare = [folder for folder in folders if folder.name not in keep]
    for folder in spare[: max(len(folders) - limit, 0)]:
        # a run that is ended meanwhile leaves nothing that looks like a checkpoint
        doomed = folder.with_name(f"{_INCOMPLETE}{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _publish(aside: Path, final: Path) -> None:
    if final.exists():  # written again, by a run that started over
        replaced = final.with_name(f"{_INCOMPLETE}{final.name}-replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        (aside / final.name).rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        (aside / final.name).rename(final)
    aside.rmdir()
    _sync(final.parent)


def _flush(folder: Path) -> None:
    """Waits until the disk has it all: a rename could outlive a crash that the data does not."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checkpoints(run_dir: Path) -> list[Path]:
    """Folders that look like checkpoints, oldest step first."""
    found = {}
    for folder in run_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if step.isdigit() and folder.is_dir():
            found[int(step)] = folder
    return [found[step] for step in sorted(found)]


def _missing(folder: Path) -> str | None:
    """A file that a complete checkpoint has and this one does not."""
    needed = (TRAINER_STATE_NAME, SETTINGS_FILE)
    return next((name for name in needed if not (folder / name).exists()), None)
