"""Ctrl-C ends a step first, and then the run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from grpo_trainer.checkpoint.files import checkpoints

_NOTICE = b"\nCtrl-C: this step ends and is saved first; another Ctrl-C ends the run at once\n"
_STDERR = 2


@contextmanager
def ctrl_c_noted(is_main_process: bool) -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C inside sets; the next one raises KeyboardInterrupt.

    Outside the main thread, and where SIGINT is ignored or has another handler, it stays so.
    """
    interrupted = threading.Event()
    usual = signal.default_int_handler

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, usual)
        if is_main_process:
            os.write(_STDERR, _NOTICE)  # what it interrupts may be in the middle of a print

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) != usual:
        yield interrupted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, usual)


def where_it_stopped(step: int, run_dir: Path, resumable: bool) -> str:
    """Return what an interrupted run says: its step, and how to go on."""
    stopped, written = f"stopped after step {step}", checkpoints(run_dir)
    if not written or not resumable:
        return f"{stopped}; there is no checkpoint to go on from"
    return (
        f"{stopped}; newest checkpoint: {written[-1]}; --resume_from_checkpoint true, in Python "
        "train(resume_from_checkpoint=True), goes on from it"
    )
