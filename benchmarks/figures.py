"""Everything that is computed from stored measurements: each formula once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.results import (
    AccuracyRow,
    AccuracyTable,
    Row,
    SavingsRow,
    Table,
    TrainingRow,
)
from benchmarks.shapes import Case, Model
from benchmarks.work import WORKS

BARE = "bare-gemms"
QUOTED = ("ours", "ours-input")  # ours with exact logits, and with logits rounded as baselines do


@dataclass(frozen=True, kw_only=True)
class Times:
    """Samples of one provider, in seconds."""

    median: float
    minimum: float
    maximum: float
    to: dict[str, float]  # ratio of the medians to each provider of the table


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One row, with all that follows from it."""

    name: str
    row: Row
    times: Times | None
    extra: int | None  # bytes beyond the inputs and what is returned
    value_error: float | None  # the largest of loss, log-probabilities and entropy
    gradient_error: float | None  # the larger of dhidden and dweight

    @property
    def median(self) -> float | None:
        return self.times.median if self.times else None

    def to(self, base: str) -> float | None:
        """Return the time over that of another provider."""
        return self.times.to.get(base) if self.times else None


def times(
    rows: Sequence[Row] | Sequence[SavingsRow] | Sequence[TrainingRow], phase: str = ""
) -> dict[str, Times]:
    """Summarise the samples of those that were timed; ``phase``: of a part of a training step."""
    samples = {
        row.provider: getattr(row, "phases", {}).get(phase, []) if phase else row.seconds
        for row in rows
        if not row.failure
    }
    medians = {name: statistics.median(values) for name, values in samples.items() if values}
    return {
        name: Times(
            median=median,
            minimum=min(samples[name]),
            maximum=max(samples[name]),
            to={other: median / base for other, base in medians.items()},
        )
        for name, median in medians.items()
    }


def here(rows: Sequence) -> list:
    """Leave out who is absent or unable; sort by time, failures last."""
    timed = times(rows)
    present = (row for row in rows if row.absent is None and row.unable is None)
    return sorted(
        present, key=lambda x: timed[x.provider].median if x.provider in timed else math.inf
    )


def figures(table: Table) -> dict[str, Figures]:
    """Compute a table's figures by provider: bare GEMMs first, then by time, failures last."""
    timed = times(table.rows)
    rows = sorted(here(table.rows), key=lambda row: row.provider != BARE)
    return {row.provider: _figures(row, timed.get(row.provider)) for row in rows}


def _figures(row: Row, timed: Times | None) -> Figures:
    memory = None if row.failure else row.memory
    return Figures(
        name=row.provider,
        row=row,
        times=timed,
        extra=memory.extra if memory else None,
        value_error=_largest(row, ("loss", "logprobs", "entropy")),
        gradient_error=_largest(row, ("dhidden", "dweight")),
    )


def _largest(row: Row, outputs: Sequence[str]) -> float | None:
    return max((row.errors[name] for name in outputs if name in row.errors), default=None)


def case(table: Table) -> Case:
    """Return the case as it was measured, whatever the registry of models says now."""
    model = Model(table.model, table.hidden, table.vocabulary, table.softcap)
    return Case(model, table.tokens, table.dtype, WORKS[table.work])


def is_ours(provider: str) -> bool:
    return provider.split("-")[0] == "ours"


def baselines(rows: dict[str, Figures]) -> list[Figures]:
    return [x for name, x in rows.items() if name != BARE and not is_ours(name)]


def fastest(rows: dict[str, Figures]) -> Figures | None:
    """Return the fastest baseline."""
    timed = [x for x in baselines(rows) if x.times]
    return min(timed, key=lambda x: x.median or 0, default=None)


def leanest(rows: dict[str, Figures]) -> Figures | None:
    """Return the baseline with the least extra memory."""
    known = [x for x in baselines(rows) if x.extra is not None]
    return min(known, key=lambda x: x.extra or 0, default=None)


# tokens by their probability p: above the first, and at most the second
BANDS = {
    "p > 0.98": (0.98, math.inf),
    "p 0.5 to 0.98": (0.5, 0.98),
    "p < 0.5": (-math.inf, 0.5),
}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median and the largest size of some values."""

    median: float
    maximum: float


@dataclass(frozen=True, kw_only=True)
class AccuracyFigures:
    """One row of errors by token, with all that follows from it."""

    name: str
    row: AccuracyRow
    logprobs: dict[str, Spread]  # absolute errors by the name of the band; none for an empty one
    noise: Spread | None  # |exp(error) - 1|: of an importance ratio whose other side is exact
    mean_noise: float | None
    entropy: Spread | None  # absolute errors
    gradients: dict[str, Spread]  # of dhidden's rows that have one: relative errors, by band


def accuracy_figures(table: AccuracyTable) -> dict[str, AccuracyFigures]:
    """Compute errors by provider: ours first, then by noise or dhidden, failures last."""
    found = [_accuracy_figures(row, table) for row in table.rows if not (row.absent or row.unable)]

    def place(x: AccuracyFigures) -> tuple[bool, int, float]:
        quoted = QUOTED.index(x.name) if x.name in QUOTED else len(QUOTED)
        size = x.row.errors.get("dhidden") if x.mean_noise is None else x.mean_noise
        return x.row.failure is not None, quoted, math.inf if size is None else size

    return {x.name: x for x in sorted(found, key=place)}


def _accuracy_figures(row: AccuracyRow, table: AccuracyTable) -> AccuracyFigures:
    relative = {
        i: row.dhidden[i] / norm for i, norm in enumerate(table.dhidden) if row.dhidden and norm > 0
    }
    noise = [abs(math.expm1(error)) for error in row.logprobs]
    return AccuracyFigures(
        name=row.provider,
        row=row,
        logprobs=_by_band(dict(enumerate(row.logprobs)), table.logprobs),
        noise=spread(noise),
        mean_noise=statistics.fmean(noise) if noise else None,
        entropy=spread(row.entropy),
        gradients=_by_band(relative, table.logprobs),
    )


def _by_band(errors: dict[int, float], exact: Sequence[float]) -> dict[str, Spread]:
    """Group errors by token."""
    found = {}
    for band in BANDS:
        if of_band := spread([errors[i] for i in within(band, exact) if i in errors]):
            found[band] = of_band
    return found


def within(band: str, exact: Sequence[float]) -> list[int]:
    """Return the tokens of a band, by their exact log-probabilities."""
    low, high = BANDS[band]
    return [i for i, logprob in enumerate(exact) if low < math.exp(logprob) <= high]


def spread(values: Sequence[float]) -> Spread | None:
    """Summarise the sizes of some values; None of none."""
    sizes = [abs(value) for value in values]
    return Spread(median=statistics.median(sizes), maximum=max(sizes)) if sizes else None
