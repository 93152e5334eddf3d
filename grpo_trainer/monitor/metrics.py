"""Metrics of a step: phases and their time, values and their means."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from grpo_kernels.losses import Metrics, Stat

# generation, weights on their way to the engine, rewards and advantages, log-probabilities of the
# old policy and of the reference, forward and backward of the loss
PHASES = ("generate", "sync", "score", "old", "ref", "loss")

_FOLD_AFTER = 256  # marks that may wait on a device, so that long windows hold few events

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
        self._device = device
        self._open: list[str] = []  # phases, the innermost last
        self._marks: list[tuple[str | None, Any]] = []  # which one went on, and when
        self._seconds: dict[str, float] = {}  # of those that were entered
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
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    def step(self) -> None:
        """End an optimizer step."""
        self._steps += 1

    def drain(self) -> Metrics:
        """Return ``profiling/...``, and ``step_time``, their sum."""
        self._fold()
        seconds = {f"profiling/{name}": self._seconds.get(name) for name in PHASES}
        seconds["step_time"] = sum(self._seconds.values())
        stats = {name: self._stat(value) for name, value in seconds.items()}
        self._seconds, self._steps = {}, 0
        return Metrics(stats)

    def _stat(self, seconds: float | None) -> Stat:
        steps = 0 if seconds is None else self._steps
        numbers = torch.tensor([seconds or 0.0, steps], dtype=torch.float64)
        return Stat("mean", *numbers.to(self._device))

    def _mark(self) -> None:
        on_gpu = self._device.type == "cuda"
        now = _event() if on_gpu else time.perf_counter()
        self._marks.append((self._open[-1] if self._open else None, now))
        if not on_gpu or len(self._marks) > _FOLD_AFTER:
            self._fold()

    def _fold(self) -> None:
        for (name, start), (_, end) in pairwise(self._marks):
            if name is not None:
                self._seconds[name] = self._seconds.get(name, 0.0) + _seconds(start, end)
        self._marks = self._marks[-1:]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


_ZERO_OF_NONE = "_terminated_length"

_MERGE_AFTER = 64  # merge pending micro-batches, so that long windows hold few tensors


class MetricLog:
    """Collects :class:`grpo_kernels.losses.Metrics` until they are logged."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pending: list[Metrics] = []
        self.phases = Phases(accelerator.device)

    def add(self, metrics: Metrics) -> None:
        self._pending.append(metrics)
        if len(self._pending) >= _MERGE_AFTER:
            self._pending = [Metrics.merge(self._pending)]

    def state(self) -> list[dict[str, tuple[str, Tensor, Tensor]]]:
        """Return what is not logged yet, as it is: merging it would change how it is rounded."""
        return [
            {name: (stat.kind, stat.total, stat.count) for name, stat in metrics.stats.items()}
            for metrics in self._pending
        ]

    def restore(self, state: list[dict[str, tuple[str, Tensor, Tensor]]]) -> None:
        self._pending = [
            Metrics({name: Stat(*fields) for name, fields in stats.items()}) for stats in state
        ]

    def drain(self) -> dict[str, float]:
        """Return values over all micro-batches and processes, without names that have no sample.

        The lengths of completions that ended are 0 where none did, as in TRL.
        """
        merged = Metrics.merge([*self._pending, self.phases.drain()])
        if self._accelerator.num_processes > 1:
            merged = merged.gathered(self._accelerator.gather)
        self._pending = []
        values = torch.stack([merged[name].double() for name in merged]).tolist()
        read = dict(zip(merged, values, strict=True))
        return {
            name: value if value == value else 0.0
            for name, value in read.items()
            if value == value or name.endswith(_ZERO_OF_NONE)
        }


def value_metric(
    name: str, value: float | Tensor, device: torch.device, whole: bool = True
) -> Metrics:
    """Return one sample of a number, averaged over the window; or a part of the next one."""
    total = torch.as_tensor(value, dtype=torch.float64, device=device).detach()
    return Metrics({name: Stat("mean", total, torch.full_like(total, whole))})


def token_rate(before: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Return the tokens per second between two rows; None where they do not say."""
    seconds = row.get("step_time", 0.0) * (row.get("step", 0) - before["step"])
    if "num_tokens" not in row or seconds <= 0:
        return None
    return (row["num_tokens"] - before["num_tokens"]) / seconds
