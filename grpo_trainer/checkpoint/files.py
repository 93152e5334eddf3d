"""Checkpoints and models that are whole or not there: written aside, then renamed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from grpo_trainer.monitor import CARD_NAME

MANIFEST_NAME = "checksums.json"

_EDITABLE = (MANIFEST_NAME, CARD_NAME)  # no run reads the card: it may be edited
_CHUNK = 1 << 20  # bytes that are read at once


class _File(NamedTuple):
    """What a file must be."""

    size: int
    sha256: str


class Manifest:
    """The files of ``folder``, as they were written.

    Raises:
        ValueError: the list is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / MANIFEST_NAME
        if not path.is_file():
            raise ValueError(f"{folder} has no {MANIFEST_NAME}")
        try:
            content = json.loads(path.read_text())
            if _digest_of(content["files"]) != content["sha256"]:
                raise ValueError("its checksum differs")
            self._files = {name: _File(**entry) for name, entry in content["files"].items()}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check_sizes(self) -> None:
        """Raise ValueError unless every file is there, as long as it was."""
        for name, file in self._files.items():
            path = self._folder / name
            if not path.is_file():
                raise ValueError(f"{self._folder} has no {name}")
            if path.stat().st_size != file.size:
                raise ValueError(
                    f"{path} is damaged: expected {file.size} bytes, got {path.stat().st_size}"
                )

    def check_contents(self, names: Iterable[str] | None = None) -> None:
        """Raise ValueError unless the files ``names``, by default all, are what was written."""
        names = list(self._files if names is None else names)
        paths = [self._folder / name for name in names]
        for name, path, digest in zip(names, paths, _digests(paths), strict=True):
            if digest != self._files[name].sha256:
                raise ValueError(f"{path} is damaged: its checksum is not that in {MANIFEST_NAME}")


def write_manifest(folder: Path) -> Path:
    """List every file below ``folder``, and return where."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    paths = [path for path in paths if path.relative_to(folder).as_posix() not in _EDITABLE]
    files = {
        path.relative_to(folder).as_posix(): _File(path.stat().st_size, digest)._asdict()
        for path, digest in zip(paths, _digests(paths), strict=True)
    }
    content = {"files": files, "sha256": _digest_of(files)}
    (folder / MANIFEST_NAME).write_text(json.dumps(content, indent=2) + "\n")
    return folder / MANIFEST_NAME


def _digests(paths: list[Path]) -> list[str]:
    """Hash several files at once: that lets other threads run."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_digest, paths))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _digest_of(files: dict[str, dict[str, int | str]]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


logger = logging.getLogger(__name__)

_LOCK_NAME = "_training.lock"  # uploads to the hub leave out what begins so


class StartError(ValueError):
    """Training cannot begin as it was asked for."""


def raise_together(accelerator: Accelerator, problem: str | None) -> None:
    """Raise StartError on all processes if one has a ``problem``. Every process calls it."""
    problems = [text for text in gather_object([problem]) if text is not None]
    if problems:
        raise StartError(problems[0])


@contextmanager
def only_run(run_dir: Path, accelerator: Accelerator) -> Iterator[None]:
    """Keep other runs out of ``run_dir``; the system ends that, too, when the process is killed.

    The main process locks for all of them.

    Raises:
        StartError: another run is there.
    """
    lock, problem = None, None
    if accelerator.is_main_process:
        try:
            lock = _locked(run_dir)
        except StartError as error:
            problem = str(error)
    raise_together(accelerator, problem)
    try:
        yield
    finally:
        if lock is not None:
            (run_dir / _LOCK_NAME).unlink(missing_ok=True)
            lock.release()


def _locked(run_dir: Path) -> FileLock | None:
    """Lock ``run_dir``; None where the file system has no locks, or nothing can be written."""
    path = run_dir / _LOCK_NAME
    lock = FileLock(path)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    except Timeout:
        raise StartError(
            f"output_dir: expected a folder without a run in it, got {str(run_dir)!r}, where "
            f"{path.read_text() or 'another process'} trains; its {_LOCK_NAME} is locked"
        ) from None
    except (OSError, NotImplementedError) as error:
        logger.warning("%s cannot be locked, so nothing keeps other runs out: %s", run_dir, error)
        return None
    return lock


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
