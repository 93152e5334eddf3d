"""Errors of a loss and its gradients on a policy's distributions, per provider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.accuracy.derive import BANDS, AccuracyFigures, accuracy_figures, is_of_gradients
from benchmarks.accuracy.table import in_order
from benchmarks.load import AccuracyTable
from benchmarks.plots.accuracy import BAR_HEIGHT, Bars, draw_bars

_OUTPUTS = ("loss", "dhidden", "dweight")


def draw_gradients(tables: Sequence[AccuracyTable]) -> Any:
    """A row of panels per case: every output, and the rows of dhidden at decided tokens."""
    chosen = in_order([table for table in tables if is_of_gradients(table)])
    if not chosen:
        return None
    import matplotlib.pyplot as plt

    rows = [accuracy_figures(table) for table in chosen]
    heights = [1.2 + BAR_HEIGHT * len(row) for row in rows]
    figure, axes = plt.subplots(
        len(chosen), len(_OUTPUTS) + 2, figsize=(13.5, sum(heights) + 0.4), squeeze=False,
        layout="constrained", gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for line, table, row in zip(axes, chosen, rows, strict=True):
        for index, (axis, bars) in enumerate(zip(line, _panels(table, row), strict=True)):
            draw_bars(axis, bars, list(row), labelled=index == 0)
    figure.suptitle(
        f"Loss and gradients on a policy's distributions: error against {chosen[0].reference}, "
        f"shorter is more exact ({chosen[0].environment.device})",
        fontsize=11, fontweight="bold",
    )  # fmt: skip
    return figure


def _panels(table: AccuracyTable, row: dict[str, AccuracyFigures]) -> list[Bars]:
    band = BANDS[0].name
    errors = {output: {n: x.row.errors.get(output) for n, x in row.items()} for output in _OUTPUTS}
    spreads = {name: x.gradients.get(band) for name, x in row.items()}
    errors[f"rows, {band}: median"] = {n: x.median if x else None for n, x in spreads.items()}
    errors[f"rows, {band}: max"] = {n: x.maximum if x else None for n, x in spreads.items()}
    case = f"{table.work}, {table.model}, T = {table.tokens}, {table.dtype}"
    failed = [name for name, x in row.items() if x.row.failure]
    return [
        Bars(
            title=title,
            case=case,
            errors={name: value for name, value in values.items() if value is not None},
            failed=failed,
        )
        for title, values in errors.items()
    ]
