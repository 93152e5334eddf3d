"""Ctrl-C while a run trains: the step ends, and is saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from accelerate import Accelerator

_NOTICE = b"\nCtrl-C: this step ends and is saved first; another Ctrl-C ends the run at once\n"
_STDERR = 2


class Interrupt:
    """Whether somebody asked the run to end, on any of its processes."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._here = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Take note of the first Ctrl-C inside; the next raises KeyboardInterrupt, as ever.

        Outside the main thread, and where SIGINT is ignored or has another handler, it stays so.
        """
        self._here = False
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGINT) != signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._here = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._accelerator.is_main_process:
            os.write(_STDERR, _NOTICE)  # what it interrupts may be in the middle of a print

    def asked(self) -> bool:
        """Return whether any process has noted one. Every process calls it, after a step.

        With several processes it waits for the step: they go on together, or none does.
        """
        if self._accelerator.num_processes == 1:
            return self._here
        here = torch.tensor([self._here], device=self._accelerator.device)
        return bool(self._accelerator.gather(here).any())
