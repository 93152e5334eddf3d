"""Candidates for one entry of the table: checked, then timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import describe, in_turns

Timer = Callable[[Callable[[], Any]], float]

MARGIN = 0.03  # of the default's time; a lead that is smaller may be noise
_ROUNDS = 7
_FINALISTS = 3
_FINAL_ROUNDS = 21
_BLOCK_ROWS = 256  # compared at a time: no large copies


class DeviceLostError(RuntimeError):
    """A kernel faulted: nothing more can run in this process."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One value, and how to measure it."""

    value: tuple[int, ...]
    check: Callable[[], str | None]  # why its result is wrong; also its warm-up
    prepare: Callable[[], Any] = lambda: None  # before each run, outside of its time
    run: Callable[[], Any]


@dataclass(kw_only=True)
class Trial:
    """The measurements of a candidate."""

    value: tuple[int, ...]
    failure: str | None = None
    seconds: list[float] = field(default_factory=list)
    final: list[float] = field(default_factory=list)  # of the fastest and the default, again


def difference(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float
) -> str | None:
    """Return what is anywhere further from ``want`` than a part of its largest value; NaN is."""
    for name, expected in want.items():
        parts = list(zip(_parts(got[name]), _parts(expected), strict=True))
        error = torch.stack([(a.float() - b.float()).abs().amax() for a, b in parts]).amax()
        largest = torch.stack([b.abs().amax() for _, b in parts]).amax()
        if not error <= tolerance * largest:
            return f"{name} differs by {error:.1e}"
    return None


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    return torch.atleast_1d(x).split(_BLOCK_ROWS)


def hold(candidates: Sequence[Candidate], seconds: Timer, lost: Callable[[], bool]) -> list[Trial]:
    """Measure all of them; the first is the default.

    The fastest of many is partly the luckiest, so the fastest few are timed again beside the
    default, and only that counts. A default that fails is alone: nothing is tuned on top of it.

    Raises:
        DeviceLostError: ``lost`` says so after a check.
    """
    trials = [Trial(value=candidate.value) for candidate in candidates]
    pairs = list(zip(trials, candidates, strict=True))
    for trial, candidate in pairs:
        try:
            candidate.prepare()
            trial.failure = candidate.check()
        except Exception as error:  # it does not compile, or does not fit: a result like any other
            trial.failure = describe(error)
        if lost():
            raise DeviceLostError(f"{trial.value}: {trial.failure}")
    if trials[0].failure is not None:
        return trials
    right = [pair for pair in pairs if pair[0].failure is None]
    for trial, candidate in in_turns(right, _ROUNDS):
        candidate.prepare()
        trial.seconds.append(seconds(candidate.run))
    fastest = sorted(right, key=lambda pair: median(pair[0].seconds))[:_FINALISTS]
    finalists = fastest if right[0] in fastest else [right[0], *fastest]
    for trial, candidate in in_turns(finalists, _FINAL_ROUNDS):
        candidate.prepare()
        trial.final.append(seconds(candidate.run))
    return trials


def choose(trials: Sequence[Trial]) -> tuple[int, ...]:
    """Return the value to use: the default's, unless another is faster by more than the margin."""
    times = {trial.value: median(trial.final) for trial in trials if trial.final}
    default = trials[0].value
    winner = min(times, key=lambda value: times[value], default=default)
    clear = bool(times) and times[winner] < (1 - MARGIN) * times[default]
    return winner if clear else default
