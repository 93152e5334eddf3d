"""Everything that is computed from stored measurements: each formula once.

A result file holds raw data only, so a better formula needs no new run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from benchmarks.load import Table, TrainingRow
from benchmarks.row import Row, SavingsRow
from benchmarks.shapes import Case, Model
from benchmarks.work import WORKS

FLOOR = "floor"
QUOTED = ("ours", "ours-input")  # ours with exact logits, and with logits rounded as peers do
_MIB = 2**20
AnyRow = TypeVar("AnyRow", Row, TrainingRow, SavingsRow)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Samples of one provider, in seconds."""

    median: float
    minimum: float
    maximum: float
    to: dict[str, float]  # ratio of the medians to each provider of the table

    @property
    def spread(self) -> float:
        """Width of the samples over their median."""
        return (self.maximum - self.minimum) / self.median


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One row, with all that follows from it."""

    row: Row
    times: Times | None
    tflops: float | None  # of the operations that no exact implementation can avoid
    extra: float | None  # MiB beyond the inputs and what is returned
    returned: float | None  # MiB
    predicted: float | None  # MiB, what the plan says ``extra`` is
    prediction: float | None  # predicted over measured
    value_error: float | None  # the largest of loss, log-probabilities and entropy
    gradient_error: float | None  # the larger of dhidden and dweight


def times(rows: Sequence[AnyRow]) -> dict[str, Times]:
    """By provider, of those that were timed."""
    return _times({row.provider: row.seconds for row in rows if not row.failure})


def phase_times(rows: Sequence[TrainingRow], phase: str) -> dict[str, Times]:
    """The same of one phase of a training step."""
    return _times({row.provider: row.phases.get(phase, []) for row in rows if not row.failure})


def _times(samples: dict[str, list[float]]) -> dict[str, Times]:
    samples = {name: seconds for name, seconds in samples.items() if seconds}
    medians = {name: statistics.median(seconds) for name, seconds in samples.items()}
    return {
        name: Times(
            median=medians[name],
            minimum=min(seconds),
            maximum=max(seconds),
            to={other: medians[name] / base for other, base in medians.items()},
        )
        for name, seconds in samples.items()
    }


def figures(table: Table) -> dict[str, Figures]:
    """By provider, of those that are here and able: floor first, then by time, failures last."""
    timed, flop = times(table.rows), case(table).flop
    rows = sorted(here(table.rows), key=lambda row: row.provider != FLOOR)
    return {row.provider: _figures(row, timed.get(row.provider), flop) for row in rows}


def here(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Those that are on the machine and able to do the work: by time, failures last."""
    timed = times(rows)
    present = (row for row in rows if row.absent is None and row.unable is None)
    return sorted(present, key=lambda x: timed[x.provider].median if x.provider in timed else inf)


def _figures(row: Row, timed: Times | None, flop: float) -> Figures:
    memory = None if row.failure else row.memory
    predicted = memory.predicted if memory else None
    return Figures(
        row=row,
        times=timed,
        tflops=flop / timed.median / 1e12 if timed else None,
        extra=mib(memory.extra) if memory else None,
        returned=mib(memory.returned) if memory else None,
        predicted=mib(predicted) if predicted is not None else None,
        prediction=predicted / memory.extra if predicted and memory and memory.extra > 0 else None,
        value_error=_largest(row, ("loss", "logprobs", "entropy")),
        gradient_error=_largest(row, ("dhidden", "dweight")),
    )


def _largest(row: Row, outputs: Sequence[str]) -> float | None:
    return max((row.errors[name] for name in outputs if name in row.errors), default=None)


def case(table: Table) -> Case:
    """The case as it was measured, whatever the registry of models says now."""
    model = Model(table.model, table.hidden, table.vocabulary, table.softcap)
    return Case(model, table.tokens, table.dtype, WORKS[table.work])


def mib(size: int) -> float:
    return size / _MIB


def logits_mib(table: Table) -> float:
    """Size of the full (T, V) logits in the input dtype."""
    return table.tokens * table.vocabulary * case(table).torch_dtype.itemsize / _MIB


def is_ours(provider: str) -> bool:
    return provider.split("-")[0] == "ours"


def is_peer(provider: str) -> bool:
    return provider != FLOOR and not is_ours(provider)


def fastest_peer(rows: dict[str, Figures]) -> Figures | None:
    timed = [x for name, x in rows.items() if is_peer(name) and x.times]
    return min(timed, key=lambda x: x.times.median if x.times else 0, default=None)


def leanest_peer(rows: dict[str, Figures]) -> Figures | None:
    known = [x for name, x in rows.items() if is_peer(name) and x.extra is not None]
    return min(known, key=lambda x: x.extra or 0, default=None)
