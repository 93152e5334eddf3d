"""Candidates for one entry of the table: checked, then timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

Timer = Callable[[Callable[[], Any]], float]

MARGIN = 0.03  # of the default's time; a lead that is smaller may be noise
_ROUNDS = 7
_FINALISTS = 3
_FINAL_ROUNDS = 21


class DeviceLostError(RuntimeError):
    """A kernel faulted: nothing more can run in this process."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One value, and how to measure it."""

    value: tuple[int, ...]
    check: Callable[[], str | None]  # why its result is wrong; also its warm-up
    prepare: Callable[[], None]  # before each run, outside of its time
    run: Callable[[], Any]


@dataclass(kw_only=True)
class Trial:
    """The measurements of a candidate."""

    value: tuple[int, ...]
    failure: str | None = None
    seconds: list[float] = field(default_factory=list)
    final: list[float] = field(default_factory=list)  # of the fastest and the default, again


def hold(candidates: Sequence[Candidate], seconds: Timer, lost: Callable[[], bool]) -> list[Trial]:
    """Measure all of them; the first is the default.

    The fastest of many is partly the luckiest, so the fastest few are timed again beside the
    default, and only that counts. A default that fails is alone: nothing is tuned on top of it.

    Raises:
        DeviceLostError: ``lost`` says so after a check.
    """
    trials = [Trial(value=candidate.value) for candidate in candidates]
    for candidate, trial in zip(candidates, trials, strict=True):
        trial.failure = _failure(candidate)
        if lost():
            raise DeviceLostError(f"{trial.value}: {trial.failure}")
    if trials[0].failure is not None:
        return trials
    right = [pair for pair in zip(candidates, trials, strict=True) if pair[1].failure is None]
    for candidate, trial in _turns(right, _ROUNDS):
        trial.seconds.append(_time(candidate, seconds))
    fastest = sorted(right, key=lambda pair: median(pair[1].seconds))[:_FINALISTS]
    finalists = fastest if right[0] in fastest else [right[0], *fastest]
    for candidate, trial in _turns(finalists, _FINAL_ROUNDS):
        trial.final.append(_time(candidate, seconds))
    return trials


def choose(trials: Sequence[Trial]) -> tuple[int, ...]:
    """Return the value to use: the default's, unless another is faster by more than the margin."""
    times = _final_medians(trials)
    default = trials[0].value
    winner = min(times, key=lambda value: times[value], default=default)
    clear = bool(times) and times[winner] < (1 - MARGIN) * times[default]
    return winner if clear else default


def gain(trials: Sequence[Trial]) -> float:
    """Return the default's time over that of the chosen value."""
    times = _final_medians(trials)
    return times[trials[0].value] / times[choose(trials)] if times else 1.0


def _final_medians(trials: Sequence[Trial]) -> dict[tuple[int, ...], float]:
    return {trial.value: median(trial.final) for trial in trials if trial.final}


def _failure(candidate: Candidate) -> str | None:
    try:
        candidate.prepare()
        return candidate.check()
    except Exception as error:  # it does not compile, or does not fit: a result like any other
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _time(candidate: Candidate, seconds: Timer) -> float:
    candidate.prepare()
    return seconds(candidate.run)


def _turns(
    pairs: Sequence[tuple[Candidate, Trial]], rounds: int
) -> Iterator[tuple[Candidate, Trial]]:
    """Yield each pair once per round, every other round backwards."""
    for index in range(rounds):
        yield from pairs if index % 2 == 0 else reversed(pairs)
