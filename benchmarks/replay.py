"""pytest-benchmark as the keeper of samples that were measured in turn.

Its own loop runs one test to the end before the next begins, so a change of the machine's load
would hit some providers only, and it knows no device events. So all providers of a case are
measured together, and each test then replays its samples on the clock that pytest-benchmark reads.
"""

from __future__ import annotations

from typing import Any

_now = 0.0


def clock() -> float:
    return _now


def replay(benchmark: Any, seconds: list[float]) -> None:
    """Hand the samples to the ``benchmark`` fixture, whose timer is ``clock``."""
    samples = iter(seconds)

    def advance() -> None:
        global _now
        _now += next(samples)

    benchmark.pedantic(advance, rounds=len(seconds))
