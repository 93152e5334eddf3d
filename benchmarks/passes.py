"""The yardstick of kernels that only read and write memory: the time of a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks import text
from benchmarks.conftest import Session
from benchmarks.measure import attempt, race
from benchmarks.results import Row
from benchmarks.timing import make_timer

COPY = "copy"  # the provider whose bytes give the rate


class Pass(NamedTuple):
    """A call and the bytes that it reads and writes."""

    call: Callable[[], Any]
    nbytes: int
    restore: Callable[[], Any] = lambda: None  # untimed, before each call
    errors: Callable[[Any], dict[str, float]] = lambda result: {}  # of what it returns


def copy_pass(source: Tensor) -> Pass:
    """Return a copy, read and written."""
    copied = source.clone()
    return Pass(lambda: copied.copy_(source), 2 * source.nbytes)


def race_passes(
    rows: Sequence[Row], passes: dict[str, Pass], allowed: dict[str, float], session: Session
) -> None:
    """Check all, then time them in turns, relative to a copy of the same number of bytes.

    ``allowed``: the largest allowed error, by name.
    """
    timer = make_timer(session.device)
    for row in rows:
        with attempt(row):
            one = passes[row.provider]
            one.restore()
            row.errors = one.errors(one.call())
            bad = [f"{k} {x:.1e}" for k, x in row.errors.items() if not x <= allowed[k]]
            row.leave_out("wrong", f"error of {', '.join(bad)}" if bad else None)

    def seconds(one: Pass) -> float:
        one.restore()
        return timer(one.call)

    race([(row, passes[row.provider]) for row in rows], session.rounds(20), seconds)
    medians = {row.provider: row.median for row in rows if row.median}
    rate = passes[COPY].nbytes / medians[COPY] if COPY in medians else None  # bytes a second
    for row in rows:
        if row.median and rate:
            size = passes[row.provider].nbytes
            row.info["of_its_bytes"] = row.median * rate / size
            row.cells = {
                "GB/s": text.digits(1e-9 * size / row.median),
                "x its bytes": text.ratio(row.info["of_its_bytes"]),
            }
