"""Checkpoints and models that are complete or absent: written aside, then renamed."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import socket
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from grpo_trainer.monitor import CARD_NAME

logger = logging.getLogger(__name__)

MANIFEST_NAME = "SHA256SUMS"
SETTINGS_FILE = "grpo_settings.json"
_EDITABLE = (MANIFEST_NAME, CARD_NAME)  # no run reads the card, so users may edit it
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")  # a line of the manifest: `sha256sum -c` reads it
_LOCK_NAME = "_training.lock"  # uploads to the hub skip names that begin like this
_INCOMPLETE = "incomplete-"  # no tool mistakes a folder of this name for a checkpoint
_REPLACED = "replaced"  # the checkpoint of the same name, in the folder of the new one
# without these files a folder is not a model
MODEL_ENTRIES = ("config.json", "adapter_config.json")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class CheckpointError(RuntimeError):
    """A checkpoint or a model could not be written."""


class StartError(ValueError):
    """Training cannot start as requested."""


def write_manifest(folder: Path) -> None:
    """List the checksums of all files below ``folder``."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix() for path in paths}.difference(_EDITABLE)
    # the settings come last: a list that was cut off lacks them, and no run resumes from it
    ordered = sorted(names, key=lambda name: (name == SETTINGS_FILE, name))
    lines = [f"{digest}  {name}\n" for name, digest in _digests(folder, ordered).items()]
    (folder / MANIFEST_NAME).write_text("".join(lines))


def read_manifest(folder: Path) -> dict[str, str]:
    """Return the checksums of the files of ``folder`` by name; ValueError if a file or the list is
    missing, or the list is damaged."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise ValueError(f"{folder} has no {MANIFEST_NAME}")
    checksums = {}
    for line in path.read_text(errors="replace").splitlines():
        entry = _LINE.fullmatch(line)
        if entry is None:
            raise ValueError(f"{path} is damaged: expected a checksum and a name, got {line!r}")
        checksums[entry[2]] = entry[1]
    for name in checksums:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}")
    return checksums


def check_contents(folder: Path, checksums: dict[str, str]) -> None:
    """Raise ValueError unless the named files of ``folder`` are as they were written."""
    for name, digest in _digests(folder, checksums).items():
        if digest != checksums[name]:
            path = folder / name
            raise ValueError(f"{path} is damaged: its checksum differs from {MANIFEST_NAME}")


def _digests(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Hash several files at once; other threads can run meanwhile."""

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


@contextmanager
def raised_together(accelerator: Accelerator) -> Iterator[None]:
    """Raise StartError on all processes if one raises ValueError inside. All processes call it."""
    problem = None
    try:
        yield
    except ValueError as error:
        problem = str(error)
    problems = [text for text in gather_object([problem]) if text is not None]
    if problems:
        raise StartError(problems[0])


@contextmanager
def only_run(run_dir: Path, accelerator: Accelerator) -> Iterator[None]:
    """Keep other runs out of ``run_dir``; StartError if another run is there.

    The main process holds the lock for all; if it is killed, the system releases the lock.
    """
    path = run_dir / _LOCK_NAME
    lock = FileLock(path)
    with raised_together(accelerator):
        if accelerator.is_main_process:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                lock.acquire(timeout=0)
                path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
            except Timeout:
                raise StartError(
                    f"output_dir: expected a folder that no other run uses, got {str(run_dir)!r}, "
                    f"where {path.read_text() or 'another process'} trains; its {_LOCK_NAME} is "
                    "locked"
                ) from None
            except (OSError, NotImplementedError) as error:  # no locks there, or read-only
                message = "%s cannot be locked, so other runs could write to it: %s"
                logger.warning(message, run_dir, error)
    try:
        yield
    finally:
        if lock.is_locked:
            path.unlink(missing_ok=True)
            lock.release()


@contextmanager
def written_aside(run_dir: Path, name: str, accelerator: Accelerator) -> Iterator[Path]:
    """Yield a folder for all processes to write ``name``, which then appears in ``run_dir``,
    complete. Earlier checkpoints are untouched, also by an error."""
    aside = run_dir / f"{_INCOMPLETE}{name}"
    with _freed(aside, run_dir / name):
        (aside / name).mkdir(parents=True, exist_ok=True)
        yield aside
        accelerator.wait_for_everyone()  # some writers rename their files
        _sync(*(aside / name).rglob("*"), aside / name)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _publish(aside, run_dir / name)
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process and (aside / name).exists():
            _publish(aside, run_dir / name)  # on each machine with its own disk


def delete_unfinished(run_dir: Path) -> None:
    """Delete the leftovers of runs that ended while they wrote or deleted a checkpoint.

    A checkpoint that was about to be replaced is restored.
    """
    for folder in sorted(run_dir.glob(f"{_INCOMPLETE}{PREFIX_CHECKPOINT_DIR}-*")):
        replaced, final = folder / _REPLACED, run_dir / folder.name.removeprefix(_INCOMPLETE)
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        logger.warning("deleting %s, an unfinished checkpoint", folder)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def model_aside(folder: Path) -> Iterator[Path]:
    """Yield a folder to save a model in; on leaving, it replaces the model in ``folder``, which an
    error leaves untouched."""
    aside = folder / f"{_INCOMPLETE}model"
    shutil.rmtree(aside, ignore_errors=True)
    with _freed(aside, folder):
        aside.mkdir(parents=True)
        if (folder / CARD_NAME).is_file():  # an edited card stays, and peft adds its lines to it
            shutil.copy(folder / CARD_NAME, aside)
        yield aside
        if (folder / CARD_NAME).is_dir():
            (aside / CARD_NAME).unlink(missing_ok=True)
        _sync(*aside.rglob("*"), aside)
    names = [path.relative_to(aside) for path in aside.rglob("*") if path.is_file()]
    entries = [name for name in names if name.name in MODEL_ENTRIES]
    stale = [folder / name for name in entries]
    if any(_WEIGHTS.fullmatch(str(name)) for name in names):
        # weights split into another number of files would be read instead of the new ones
        stale += [path for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name)]
    for path in stale:  # a model never consists of both new and old files
        path.unlink(missing_ok=True)
    for name in sorted(names, key=entries.__contains__):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).replace(folder / name)
    shutil.rmtree(aside)
    _sync(folder)


@contextmanager
def _freed(aside: Path, final: Path) -> Iterator[None]:
    """Raise CheckpointError if writing fails, and delete the folder that is aside."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk raises any of the three
        run_dir = aside.parent
        there = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
        free = shutil.disk_usage(there).free
        shutil.rmtree(aside, ignore_errors=True)
        kept = ", ".join(folder.name for folder in checkpoints(run_dir)) or "none"
        raise CheckpointError(
            f"{final} could not be written: {error} ({free / 2**20:.1f} MiB were free). "
            f"Existing checkpoints: {kept}"
        ) from error


def rotate(run_dir: Path, limit: int | None, keep: set[str | None]) -> None:
    """Delete the oldest complete checkpoints beyond ``limit``, except those named in ``keep``."""
    if not limit or limit < 1:
        return
    # incomplete checkpoints do not count
    folders = [folder for folder in checkpoints(run_dir) if (folder / TRAINER_STATE_NAME).exists()]
    spare = [folder for folder in folders if folder.name not in keep]
    for folder in spare[: max(len(folders) - limit, 0)]:
        # if the run is killed here, nothing left behind looks like a checkpoint
        doomed = folder.with_name(f"{_INCOMPLETE}{folder.name}")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _publish(aside: Path, final: Path) -> None:
    write_manifest(aside / final.name)
    _sync(aside / final.name / MANIFEST_NAME)
    if final.exists():  # written again by a run that started over
        final.rename(aside / _REPLACED)
    (aside / final.name).rename(final)
    _sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(*paths: Path) -> None:
    """Wait until everything is on disk: after a crash the rename could survive without the data."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders that look like checkpoints, oldest step first."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    paths = {path.name.removeprefix(prefix): path for path in run_dir.glob(f"{prefix}*")}
    steps = [step for step, path in paths.items() if step.isdigit() and path.is_dir()]
    return [paths[step] for step in sorted(steps, key=int)]
