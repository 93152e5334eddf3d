"""What kernels that only read and write memory are held against: the time of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks import text
from benchmarks.measure import race
from benchmarks.results import Row
from benchmarks.timing import make_timer

COPY = "copy"  # the provider whose bytes give the rate


class Pass(NamedTuple):
    """A call, the bytes that it reads and writes, and what is restored, untimed, before it."""

    call: Callable[[], Any]
    nbytes: int
    restore: Callable[[], Any] = lambda: None


def copy_pass(source: Tensor) -> Pass:
    """Return a copy, read and written."""
    copied = source.clone()
    return Pass(lambda: copied.copy_(source), 2 * source.nbytes)


def race_passes(rows: Sequence[Row], passes: dict[str, Pass], rounds: int, device: str) -> None:
    """Time all in turns; say by how much each is slower than a copy of as many bytes."""
    timer = make_timer(device)

    def seconds(one: Pass) -> float:
        one.restore()
        return timer(one.call)

    race([(row, passes[row.provider]) for row in rows], rounds, seconds)
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
