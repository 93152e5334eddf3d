"""Where the seconds of an optimizer step go, without a wait on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from grpo_kernels.losses import Metrics, Stat

# generation, weights on their way to the engine, rewards and advantages, log-probabilities of the
# old policy and of the reference, forward and backward of the loss
PHASES = ("generate", "sync", "score", "old", "ref", "loss")

_FOLD_AFTER = 256  # intervals that may wait on a device, so that long windows hold few events

_running: ContextVar[Phases | None] = ContextVar("running", default=None)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the time inside as ``name``, one of ``PHASES``, and not as the phase around it.

    Does nothing outside of :meth:`Phases.running`, such as in evaluation and in other threads.
    """
    phases = _running.get()
    if phases is None:
        yield
        return
    with phases.measured(name):
        yield


class Phases:
    """Seconds per phase, averaged over the optimizer steps between two log calls.

    On a GPU an interval lies between two events of its stream, which are read when it is logged.
    """

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], Any] = _event if device.type == "cuda" else time.perf_counter
        self._device = device
        self._open: list[str] = []  # phases, the innermost last
        self._since: Any = None  # when the innermost one went on
        self._intervals: list[tuple[str, Any, Any]] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._entered: set[str] = set()
        self._steps = 0

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Count as :func:`phase` does, and make that count inside."""
        token = _running.set(self)
        try:
            with self.measured(name):
                yield
        finally:
            _running.reset(token)

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        self._entered.add(name)
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def step(self) -> None:
        """End an optimizer step."""
        self._steps += 1

    def drain(self) -> Metrics:
        """Return ``profiling/...``, and ``step_time``, their sum."""
        self._fold()
        stats = {
            f"profiling/{name}": self._stat(seconds, name in self._entered)
            for name, seconds in self._seconds.items()
        }
        stats["step_time"] = self._stat(sum(self._seconds.values()), True)
        self._seconds, self._steps = dict.fromkeys(PHASES, 0.0), 0
        self._entered.clear()
        return Metrics(stats)

    def _stat(self, seconds: float, happened: bool) -> Stat:
        numbers = torch.tensor([seconds, self._steps * happened], dtype=torch.float64)
        return Stat("mean", *numbers.to(self._device))

    def _switch(self) -> None:
        now = self._mark()
        if self._open:
            self._intervals.append((self._open[-1], self._since, now))
        self._since = now
        if self._device.type != "cuda" or len(self._intervals) >= _FOLD_AFTER:
            self._fold()

    def _fold(self) -> None:
        for name, start, end in self._intervals:
            self._seconds[name] += _seconds(start, end)
        self._intervals.clear()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000
