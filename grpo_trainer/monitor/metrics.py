"""Metrics of a step: phases and their times, values and their means."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from grpo_kernels.losses import Metrics, Stat

logger = logging.getLogger(__name__)

# generation, sending weights to the engine, rewards and advantages, log-probabilities of the old
# policy and of the reference, forward and backward of the loss
PHASES = ("generate", "sync", "score", "old", "ref", "loss")

_MERGE_AFTER = 64  # merge pending micro-batches, so that long windows hold few tensors
# nats per token: neither rounding nor another engine's arithmetic can explain more
_CERTAIN, _FAR = 0.01, 0.5
_ZERO_OF_NONE = "_terminated_length"

_timing: ContextVar[MetricLog | None] = ContextVar("timing", default=None)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the time inside as ``name``, one of ``PHASES``, instead of the surrounding phase.

    Does nothing outside :meth:`MetricLog.timing`, for example in evaluation and on other threads.
    """
    log = _timing.get()
    if log is None:
        yield
        return
    around = log.enter(name)
    try:
        yield
    finally:
        log.enter(around)


class MetricLog:
    """Collects :class:`grpo_kernels.losses.Metrics`, and seconds per phase, until they are logged.

    On a GPU, a phase is measured between two events of the stream, which are read when it is
    logged.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.device = accelerator.device
        self._pending: list[Metrics] = []
        self._marks: list[tuple[str | None, Any]] = []  # a phase and when it started
        self._steps = 0

    def add(self, metrics: Metrics) -> None:
        self._pending.append(metrics)
        if len(self._pending) >= _MERGE_AFTER:
            self._pending = [Metrics.merge(self._pending)]

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Let :func:`phase` count inside."""
        token = _timing.set(self)
        try:
            yield
        finally:
            _timing.reset(token)

    def enter(self, name: str | None) -> str | None:
        """Start the phase ``name`` (None: no phase), and return the previous one."""
        around = self._marks[-1][0] if self._marks else None
        now: Any = time.perf_counter()
        if self.device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((name, now))
        return around

    def end_step(self) -> None:
        """Count an optimizer step: seconds are means over steps."""
        self._steps += 1

    def state(self) -> list[dict[str, tuple[str, Tensor, Tensor]]]:
        """Return values that are not logged yet, unmerged: merging would change their rounding."""
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

        The lengths of terminated completions are 0 if there are none, as in TRL.
        """
        merged = Metrics.merge([*self._pending, self._drain_phases()])
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

    def _drain_phases(self) -> Metrics:
        """Return ``profiling/...``, and ``step_time``, their sum."""
        spent: dict[str, float] = {}
        for (name, start), (_, end) in pairwise(self._marks):
            if name is not None:
                spent[name] = spent.get(name, 0.0) + _seconds(start, end)
        self._marks = self._marks[-1:]
        names = [*(f"profiling/{name}" for name in PHASES), "step_time"]
        seconds = [*map(spent.get, PHASES), sum(spent.values())]
        numbers = torch.tensor(
            [[each or 0.0, 0 if each is None else self._steps] for each in seconds],
            dtype=torch.float64,
            device=self.device,
        )
        self._steps = 0
        return Metrics({n: Stat("mean", *row) for n, row in zip(names, numbers, strict=True)})


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


def value_metric(name: str, value: float | Tensor, device: torch.device, count: int = 1) -> Metrics:
    """Return the sum of ``count`` samples of a number, to be averaged over the window; with 0 it is
    part of the next sample."""
    total = torch.as_tensor(value, dtype=torch.float64, device=device).detach()
    return Metrics({name: Stat("mean", total, torch.full_like(total, count))})


def log_value(name: str, value: float, count: int = 1) -> None:
    """Log a number in the current training step, as ``count`` samples; all processes call it."""
    if (log := _timing.get()) is not None:
        log.add(value_metric(name, value, log.device, count))


def log_metrics(metrics: Metrics) -> None:
    """Log metrics in the current training step; all processes call it with the same names."""
    if (log := _timing.get()) is not None:
        log.add(metrics)


class LogprobDoubt(TrainerCallback):
    """Warns once if the log-probabilities that the loss weights tokens with cannot belong to the
    tokens.

    Several zeros are fine: a token that was certain, or the only one that filters kept, has a 0.

    Args:
        most_gain: returns the most by which the engine's filters can raise a log-probability.
    """

    def __init__(self, most_gain: Callable[[], float]) -> None:
        self._most_gain = most_gain
        self._has_warned = False

    def on_log(
        self, args: Any, state: TrainerState, *_: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        apart = logs.get("sampling/sampling_logp_difference/mean", 0.0)
        unexplained = apart - self._most_gain()
        if logs.get("sampling/rollout_perplexity") == 1 and unexplained > _CERTAIN:
            what = (
                "0 for every token, as if each had been certain, while the policy's are "
                f"{-apart:.3g} on average; report None for unknown values"
            )
        elif unexplained > _FAR:
            what = (
                f"numbers that differ from the policy's by {apart:.3g} on average; expected "
                "natural logarithms of probabilities, of these tokens, with these weights, at this "
                "temperature"
            )
        else:
            return
        if state.is_world_process_zero and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "log-probabilities: the engine, or rollout_func, reports %s. The loss weights "
                "tokens by this ratio, so the gradient may almost vanish",
                what,
            )


def token_rate(before: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Return the tokens per second between two rows; None if unknown."""
    seconds = row.get("step_time", 0.0) * (row.get("step", 0) - before["step"])
    if "num_tokens" not in row or seconds <= 0:
        return None
    return (row["num_tokens"] - before["num_tokens"]) / seconds
