"""Bars of time, relative to the floor, and of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_plot(results: list[dict[str, Any]], path: Path) -> None:
    """One row of two panels for each result."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(results), 2, figsize=(9, 2.4 * len(results)), squeeze=False)
    for (time, memory), data in zip(axes, results, strict=True):
        title = f"{data['shape']['name']}, {data['dtype']}, {data['work']}"
        ratios = {row["provider"]: row["to_floor"] for row in data["rows"]}
        _bars(time, ratios, f"{title}: time / floor", "{:.2f}")
        time.axvline(1, color="black", linewidth=0.8)
        extra = {
            row["provider"]: row["memory"]["extra"] / 2**20 if row["memory"] else None
            for row in data["rows"]
        }
        _bars(memory, extra, "extra memory, MiB", "{:.0f}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(axis: Any, values: dict[str, float | None], title: str, label: str) -> None:
    """Horizontal bars, the first on top; an unmeasured one is named without a bar."""
    colours = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in values]
    bars = axis.barh(list(values), [value or 0 for value in values.values()], color=colours)
    labels = ["not measured" if v is None else label.format(v) for v in values.values()]
    axis.bar_label(bars, labels, padding=3, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_title(title, fontsize=9)
