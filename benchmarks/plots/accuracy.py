"""Errors against the reference, per output and provider."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import text
from benchmarks.derive import case, figures
from benchmarks.load import Table
from benchmarks.plots.axes import colour_names
from benchmarks.plots.style import FAILED, style
from benchmarks.shapes import DTYPES

_OUTPUTS = {
    "loss": "loss",
    "logprobs": "log-probabilities",
    "entropy": "entropy",
    "dhidden": "dhidden",
    "dweight": "dweight",
}
BAR_HEIGHT = 0.21  # inches


@dataclass(frozen=True, kw_only=True)
class Bars:
    """One panel."""

    title: str
    case: str
    errors: dict[str, float]  # by provider
    failed: Collection[str]


def draw_accuracy(tables: Sequence[Table]) -> Any:
    """A row of panels per dtype, a panel per output: logarithmic bars, shorter is better."""
    chosen = {dtype: _choose([t for t in tables if t.dtype == dtype]) for dtype in DTYPES}
    chosen = {dtype: cases for dtype, cases in chosen.items() if cases}
    if not chosen:
        return None
    import matplotlib.pyplot as plt

    names = {dtype: _providers(list(cases.values())) for dtype, cases in chosen.items()}
    heights = [1.2 + BAR_HEIGHT * len(names[dtype]) for dtype in chosen]
    outputs = [name for name in _OUTPUTS if any(name in cases for cases in chosen.values())]
    figure, axes = plt.subplots(
        len(chosen), len(outputs), figsize=(11.5, sum(heights) + 0.4), squeeze=False,
        layout="constrained", gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for row, (dtype, cases) in zip(axes, chosen.items(), strict=True):
        for index, (axis, output) in enumerate(zip(row, outputs, strict=True)):
            if output not in cases:
                axis.set_visible(False)
                continue
            draw_bars(axis, _bars(output, cases[output]), names[dtype], labelled=index == 0)
            if index == 0:
                axis.set_ylabel(dtype, fontsize=11, fontweight="bold")
    reference = next(iter(next(iter(chosen.values())).values()))
    figure.suptitle(
        f"Error against {reference.reference}, shorter is more exact "
        f"({reference.environment.device})",
        fontsize=11, fontweight="bold",
    )  # fmt: skip
    return figure


def _choose(tables: Sequence[Table]) -> dict[str, Table]:
    """Per output the case that most providers have; of those the largest."""
    chosen = {}
    for output in _OUTPUTS:
        counts = {
            index: (len(_errors(table, output)), table.work == "dapo", case(table).flop)
            for index, table in enumerate(tables)
            if _errors(table, output)
        }
        if counts:
            chosen[output] = tables[max(counts, key=counts.__getitem__)]
    return chosen


def _errors(table: Table, output: str) -> dict[str, float]:
    return {
        name: x.row.errors[output] for name, x in figures(table).items() if output in x.row.errors
    }


def _providers(tables: Sequence[Table]) -> list[str]:
    """Those with any error, ours first."""
    names = dict.fromkeys(row.provider for table in tables for row in table.rows if row.errors)
    return sorted(names, key=lambda name: not name.startswith("ours"))


def _bars(output: str, table: Table) -> Bars:
    return Bars(
        title=_OUTPUTS[output],
        case=f"{table.work}, {table.model}, T = {table.tokens}",
        errors=_errors(table, output),
        failed={row.provider for row in table.rows if row.failure},
    )


def draw_bars(axis: Any, bars: Bars, names: Sequence[str], labelled: bool) -> None:
    """One per name, logarithmic, with a dashed line at ours."""
    from matplotlib.ticker import LogLocator, NullLocator

    errors = bars.errors
    positive = [value for value in errors.values() if value > 0 and math.isfinite(value)]
    left = 10 ** math.floor(math.log10(min(positive, default=1e-8)) - 0.5)
    right = max([*positive, 10 * left]) * 10
    for place, name in enumerate(names):
        _bar(axis, place, name, errors.get(name), (left, right), name in bars.failed)
    if errors.get("ours", 0.0) > left:
        axis.axvline(
            errors["ours"], color=style("ours").colour, linewidth=0.8, linestyle="--", zorder=0
        )
    axis.set_xscale("log")
    axis.set_xlim(left, right)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_yticks(range(len(names)), names if labelled else [""] * len(names), fontsize=8)
    if labelled:
        colour_names(axis, names)
    axis.xaxis.set_major_locator(LogLocator(numticks=5))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(axis="x", linewidth=0.4, alpha=0.5)
    axis.set_axisbelow(True)
    axis.set_title(bars.title, fontsize=9, loc="left", fontweight="bold")
    axis.set_xlabel(bars.case, fontsize=6.5)


def _bar(
    axis: Any,
    place: int,
    name: str,
    error: float | None,
    limits: tuple[float, float],
    failed: bool,
) -> None:
    left, right = limits
    clear = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
    note = {"va": "center", "fontsize": 6.5, "bbox": clear}
    if error is None:
        axis.text(left * 1.2, place, "not compared", color="#aaaaaa", **note)
        return
    finite = error if math.isfinite(error) else right
    axis.barh(place, max(finite, left), color=style(name).colour, alpha=0.4 if failed else 1.0)
    label = "FAILED" if failed else text.error(error)
    axis.text(max(finite, left) * 1.15, place, label, color=FAILED if failed else "#222222", **note)
