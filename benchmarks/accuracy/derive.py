"""Everything that is computed from the errors by token: each formula once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.derive import QUOTED
from benchmarks.load import AccuracyTable
from benchmarks.row import AccuracyRow


@dataclass(frozen=True, kw_only=True)
class Band:
    """Tokens by their probability p: above ``low``, and at most ``high``."""

    name: str
    low: float
    high: float


BANDS = (
    Band(name="p > 0.98", low=0.98, high=math.inf),
    Band(name="p 0.5 to 0.98", low=0.5, high=0.98),
    Band(name="p < 0.5", low=-math.inf, high=0.5),
)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of some values."""

    median: float
    maximum: float


@dataclass(frozen=True, kw_only=True)
class AccuracyFigures:
    """One row, with all that follows from it."""

    row: AccuracyRow
    logprobs: dict[str, Spread]  # absolute errors by the name of the band; none for an empty one
    noise: float | None  # mean of |exp(error) - 1|: of an importance ratio whose rest is exact
    worst_noise: float | None
    entropy: Spread | None  # absolute errors
    gradients: dict[str, Spread]  # of dhidden's rows that have one: relative errors, by band


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What the distributions of a table are like."""

    bands: dict[str, float]  # of all tokens
    rarest: float  # the least probability of a token
    entropy: Spread | None  # None where a loss was measured
    high_entropy: float | None  # nine tenths are below


def accuracy_figures(table: AccuracyTable) -> dict[str, AccuracyFigures]:
    """By provider, of those with values, and failures last: ours, then by noise or dhidden."""
    present = (row for row in table.rows if row.absent is None and row.unable is None)
    found = [_figures(row, table) for row in present]
    return {x.row.provider: x for x in sorted(found, key=_place)}


def shares(table: AccuracyTable) -> Shares:
    count = len(table.logprobs)
    ordered = sorted(table.entropy)
    return Shares(
        bands={band.name: len(_within(band, table.logprobs)) / count for band in BANDS},
        rarest=math.exp(min(table.logprobs)),
        entropy=_spread(ordered) if ordered else None,
        high_entropy=ordered[int(0.9 * (count - 1))] if ordered else None,
    )


def is_of_gradients(table: AccuracyTable) -> bool:
    return bool(table.dhidden)


def _figures(row: AccuracyRow, table: AccuracyTable) -> AccuracyFigures:
    relative = {
        i: row.dhidden[i] / norm for i, norm in enumerate(table.dhidden) if row.dhidden and norm > 0
    }
    noise = [abs(math.expm1(error)) for error in row.logprobs]
    return AccuracyFigures(
        row=row,
        logprobs=_by_band(dict(enumerate(row.logprobs)), table.logprobs),
        noise=statistics.fmean(noise) if noise else None,
        worst_noise=max(noise, default=None),
        entropy=_spread(row.entropy) if row.entropy else None,
        gradients=_by_band(relative, table.logprobs),
    )


def _by_band(errors: dict[int, float], exact: Sequence[float]) -> dict[str, Spread]:
    """Of errors by token."""
    found = {band.name: [errors[i] for i in _within(band, exact) if i in errors] for band in BANDS}
    return {name: _spread(values) for name, values in found.items() if values}


def _within(band: Band, exact: Sequence[float]) -> list[int]:
    return [i for i, logprob in enumerate(exact) if band.low < math.exp(logprob) <= band.high]


def _spread(values: Sequence[float]) -> Spread:
    sizes = [abs(value) for value in values]
    return Spread(median=statistics.median(sizes), maximum=max(sizes))


def _place(x: AccuracyFigures) -> tuple[bool, int, float]:
    quoted = QUOTED.index(x.row.provider) if x.row.provider in QUOTED else len(QUOTED)
    size = x.row.errors.get("dhidden") if x.noise is None else x.noise
    return x.row.failure is not None, quoted, math.inf if size is None else size
