"""Whether a run may begin: alone in its folder, and on all of its processes or on none.

Two runs in a folder would overwrite and delete each other's checkpoints.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object
from filelock import FileLock, Timeout

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
