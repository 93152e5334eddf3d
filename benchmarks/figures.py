"""Everything that is computed from stored measurements: each formula once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.results import AccuracyRow, AccuracyTable, Row, Table

BARE = "bare-gemms"
QUOTED = ("ours", "ours-input")  # ours with exact logits, and with logits rounded as baselines do


@dataclass(frozen=True)
class Figures:
    """One row, with all that follows from it."""

    row: Row
    medians: dict[str, float]  # seconds by provider of the table

    @property
    def name(self) -> str:
        return self.row.provider

    @property
    def median(self) -> float | None:
        return self.medians.get(self.name)

    @property
    def extra(self) -> int | None:
        """Bytes beyond the inputs and what is returned."""
        return self.row.memory.extra if self.row.memory and not self.row.failure else None

    @property
    def value_error(self) -> float | None:
        return self._largest("loss", "logprobs", "entropy")

    @property
    def gradient_error(self) -> float | None:
        return self._largest("dhidden", "dweight")

    def _largest(self, *outputs: str) -> float | None:
        errors = self.row.errors
        return max((errors[name] for name in outputs if name in errors), default=None)

    def to(self, base: str) -> float | None:
        """Return the time over that of another provider."""
        return ratio(self.medians, self.name, base)


def medians(rows: Sequence[Any], phase: str = "") -> dict[str, float]:
    """Return the median of those that were timed; ``phase``: of a part of a training step."""
    return {
        row.provider: statistics.median(samples)
        for row in rows
        if (samples := row.phases.get(phase) if phase else row.seconds) and not row.failure
    }


def ratio(timed: dict[str, float], name: str, base: str | None) -> float | None:
    """Return one median over another, where there are both."""
    return timed[name] / timed[base] if name in timed and base in timed else None


def here(rows: Sequence[Any]) -> list[Any]:
    """Leave out who is absent or unable; sort by time, failures last."""
    timed = medians(rows)
    present = (row for row in rows if row.absent is None and row.unable is None)
    return sorted(present, key=lambda x: timed.get(x.provider, math.inf))


def figures(table: Table) -> dict[str, Figures]:
    """Compute a table's figures by provider: bare GEMMs first, then by time, failures last."""
    timed = medians(table.rows)
    rows = sorted(here(table.rows), key=lambda row: row.provider != BARE)
    return {row.provider: Figures(row, timed) for row in rows}


def is_ours(provider: str) -> bool:
    return provider.split("-")[0] == "ours"


def is_quoted(provider: str) -> bool:
    """Return whether tables of one case have it: of ours the defaults only."""
    return provider in QUOTED or not is_ours(provider)


def baselines(rows: dict[str, Figures]) -> list[Figures]:
    return [x for name, x in rows.items() if name != BARE and not is_ours(name)]


def fastest(rows: dict[str, Figures]) -> Figures | None:
    """Return the fastest baseline."""
    timed = [x for x in baselines(rows) if x.median]
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


@dataclass(frozen=True)
class AccuracyFigures:
    """One row of errors by token, with all that follows from it."""

    row: AccuracyRow
    table: AccuracyTable

    @property
    def name(self) -> str:
        return self.row.provider

    @cached_property
    def logprobs(self) -> dict[str, Spread]:
        """Absolute errors by the name of the band; none for an empty one."""
        return self._by_band(dict(enumerate(self.row.logprobs)))

    @cached_property
    def _noise(self) -> list[float]:
        """|exp(error) - 1|: of an importance ratio whose other side is exact."""
        return [abs(math.expm1(error)) for error in self.row.logprobs]

    @property
    def noise(self) -> Spread | None:
        return spread(self._noise)

    @property
    def mean_noise(self) -> float | None:
        return statistics.fmean(self._noise) if self._noise else None

    @property
    def entropy(self) -> Spread | None:
        """Absolute errors."""
        return spread(self.row.entropy)

    @cached_property
    def gradients(self) -> dict[str, Spread]:
        """Relative errors of dhidden's rows that have a gradient, by band."""
        pairs = enumerate(zip(self.row.dhidden, self.table.dhidden, strict=False))
        return self._by_band({i: error / norm for i, (error, norm) in pairs if norm > 0})

    def _by_band(self, errors: dict[int, float]) -> dict[str, Spread]:
        """Group errors by token."""
        bands = {band: within(band, self.table.logprobs) for band in BANDS}
        spreads = {b: spread([errors[i] for i in of if i in errors]) for b, of in bands.items()}
        return {band: found for band, found in spreads.items() if found}


def accuracy_figures(table: AccuracyTable) -> dict[str, AccuracyFigures]:
    """Compute errors by provider: ours first, then by noise or dhidden, failures last."""
    rows = [row for row in table.rows if not (row.absent or row.unable)]

    def place(x: AccuracyFigures) -> tuple[bool, int, float]:
        quoted = QUOTED.index(x.name) if x.name in QUOTED else len(QUOTED)
        size = x.row.errors.get("dhidden") if x.mean_noise is None else x.mean_noise
        return x.row.failure is not None, quoted, math.inf if size is None else size

    found = sorted((AccuracyFigures(row, table) for row in rows), key=place)
    return {x.name: x for x in found}


def within(band: str, exact: Sequence[float]) -> list[int]:
    """Return the tokens of a band, by their exact log-probabilities."""
    low, high = BANDS[band]
    return [i for i, logprob in enumerate(exact) if low < math.exp(logprob) <= high]


def spread(values: Sequence[float]) -> Spread | None:
    """Summarise the sizes of some values; None of none."""
    sizes = [abs(value) for value in values]
    return Spread(median=statistics.median(sizes), maximum=max(sizes)) if sizes else None
