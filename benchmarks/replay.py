"""pytest-benchmark as the keeper of samples that were measured in turn.

Its own loop runs one test to the end before the next begins, so a change of the machine's load
would hit some providers only, and it knows no device events. So all providers of a case are
measured together, and each test then replays its samples on the clock that pytest-benchmark reads.
"""

from __future__ import annotations

from typing import Any


class Clock:
    """A clock that moves by what it is told."""

    def __init__(self) -> None:
        self._now = 0.0

    def read(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


CLOCK = Clock()


def replay(benchmark: Any, seconds: list[float]) -> None:
    """Hand the samples to the ``benchmark`` fixture, whose timer is ``CLOCK.read``."""
    samples = iter(seconds)
    benchmark.pedantic(lambda: CLOCK.advance(next(samples)), rounds=len(seconds))
