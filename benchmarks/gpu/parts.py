"""The parts of a run, one after the other: one that fails or hangs leaves the next its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.gpu.log import Log

_SHORTEST = 5.0  # seconds without which no part is begun


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a part came to."""

    state: str  # "ok" | "failed" | "timeout" | "skipped"
    note: str = ""  # one line
    lines: list[str] = field(default_factory=list)  # for the summary


@dataclass(frozen=True, kw_only=True)
class Part:
    """A named step."""

    name: str
    body: Callable[[float], Outcome]  # gets the seconds it has
    limit: float  # seconds at most
    reserve: float = 0.0  # seconds that it leaves to those after it


@dataclass(frozen=True, kw_only=True)
class Done:
    """A part with its outcome."""

    name: str
    seconds: float
    outcome: Outcome


def run_parts(parts: Sequence[Part], end: float, log: Log) -> list[Done]:
    """Runs them all; ``end`` is the run's, by ``time.monotonic()``."""
    return [_run(part, end, log) for part in parts]


def _run(part: Part, end: float, log: Log) -> Done:
    start = time.monotonic()
    limit = min(part.limit, end - start - part.reserve)
    if limit < _SHORTEST:
        outcome = Outcome(state="skipped", note="no time was left")
    else:
        log.say(f"\n== {part.name}: {limit:.0f} s at most")
        try:
            outcome = part.body(limit)
        except Exception as error:  # the parts after it still run, and the summary says it
            outcome = Outcome(state="failed", note=f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - start
    log.say(f"== {part.name}: {outcome.state} after {seconds:.0f} s. {outcome.note}".rstrip())
    return Done(name=part.name, seconds=seconds, outcome=outcome)
