"""The table of what is learned with exact and with sampled gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from benchmarks import text
from benchmarks.results import LearningRow, LearningTable

_LEGEND = (
    "Means over the seeds, in brackets from the least to the largest seed. Every seed has a policy "
    "and data of its own, which its arms share. "
    "entries: of a token's gradient. whole: tokens that take the exact way. error: of the gradient "
    "of the logits, relative, in the mean over the steps."
)
_LAST = 4  # the last quarter of the steps


def learning(tables: Sequence[LearningTable]) -> str:
    """Show a line per arm."""
    if not tables:
        return ""
    return "\n\n".join([_LEGEND, *(f"{_caption(x)}\n\n{_table(x)}" for x in tables)])


def _caption(table: LearningTable) -> str:
    seeds = max(len(row.seeds) for row in table.rows)
    return (
        f"{table.model}; {table.steps} steps of up to {table.tokens} tokens, {seeds} seeds, "
        f"{table.dtype}. {table.environment.device}; {table.environment.day}."
    )


def _table(table: LearningTable) -> str:
    header = ["", "gradients", "reward: all steps", "last quarter", "entropy: all steps"]
    header += ["last quarter", "entries", "whole, %", "error"]
    return text.table(header, [_line(row) for row in table.rows])


def _line(row: LearningRow) -> list[str]:
    if row.failure is not None:
        return [row.provider, row.note, f"FAILED: {row.failure}", *[""] * 6]
    cells = [
        text.over_seeds([fmean(curve[first(curve) :]) for curve in row.curves[name]])
        for name in ("reward", "entropy")
        for first in (lambda curve: 0, lambda curve: -(len(curve) // _LAST or 1))
    ]
    entries, whole, error = (
        _mean(row.curves.get(f"backward_{name}", ())) for name in ("entries", "whole_rows", "error")
    )
    percent = None if whole is None else 100 * whole
    cells += [text.digits(entries), text.digits(percent, 2), text.error(error)]
    return [row.provider, row.note, *cells]


def _mean(curves: Sequence[Sequence[float]]) -> float | None:
    """Return the mean of the points that there are."""
    points = [x for curve in curves for x in curve if not math.isnan(x)]
    return fmean(points) if points else None
