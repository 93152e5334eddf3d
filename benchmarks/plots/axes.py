"""Panels: curves over T with their names at the end, and bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.plots.style import FAILED, style

_NAME_SIZE = 7.5
_NAME_GAP = 0.052  # of a panel's height
_CURVES_HEIGHT = 3.7  # inches
_BAR_HEIGHT = 0.21


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes."""

    height: float  # inches
    draw: Callable[[Any], None]


def curves(
    title: str,
    unit: str,
    lines: dict[str, dict[int, float]],
    *,
    names: bool = True,
    failed: Sequence[str] = (),
) -> Panel:
    """Values by tokens, one line per provider, both axes logarithmic; the failed are named."""

    def draw(axis: Any) -> None:
        for name, points in lines.items():
            axis.plot(list(points), list(points.values()), **style(name).curve())
        _scales(axis, sorted({tokens for points in lines.values() for tokens in points}))
        if failed:
            axis.text(
                0.02, 0.97, f"FAILED: {', '.join(failed)}", transform=axis.transAxes,
                verticalalignment="top", fontsize=7.5, color=FAILED,
            )  # fmt: skip
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_ylabel(unit, fontsize=8)
        axis.set_xlabel("T, tokens", fontsize=8)
        if names:
            _names_at_the_end(axis, lines)

    return Panel(height=_CURVES_HEIGHT, draw=draw)


def bars(
    title: str,
    unit: str,
    values: dict[str, float],
    labels: dict[str, str],
    failed: Sequence[str] = (),
) -> Panel:
    """One bar per provider, the shortest on top, with a number at its end; last the failed."""
    ordered = dict(sorted(values.items(), key=lambda item: item[1])) | dict.fromkeys(failed, 0.0)
    texts = [labels.get(name, "FAILED") for name in ordered]

    def draw(axis: Any) -> None:
        drawn = axis.barh(
            list(ordered), list(ordered.values()), color=[style(name).colour for name in ordered]
        )
        for text, name in zip(
            axis.bar_label(drawn, texts, padding=3, fontsize=7.5), ordered, strict=True
        ):
            text.set_color(FAILED if name in failed else "#222222")
        axis.invert_yaxis()
        axis.set_xlim(0, 1.5 * max(ordered.values()))
        axis.tick_params(labelsize=8)
        colour_names(axis, list(ordered))
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel(unit, fontsize=8)
        axis.grid(axis="x", linewidth=0.4, alpha=0.5)
        axis.set_axisbelow(True)

    return Panel(height=0.9 + _BAR_HEIGHT * len(ordered), draw=draw)


def figure_of(panels: Sequence[Panel], title: str) -> Any:
    """Two panels side by side in every row."""
    import matplotlib.pyplot as plt

    pairs = [panels[start : start + 2] for start in range(0, len(panels), 2)]
    heights = [max(panel.height for panel in pair) for pair in pairs]
    figure = plt.figure(figsize=(11, sum(heights) + 0.5), layout="constrained")
    grid = figure.add_gridspec(len(pairs), 2, height_ratios=heights)
    for row, pair in enumerate(pairs):
        for column, panel in enumerate(pair):
            panel.draw(figure.add_subplot(grid[row, column]))
    figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure


def colour_names(axis: Any, names: Sequence[str]) -> None:
    """The labels of the vertical axis in the providers' colours."""
    for label, name in zip(axis.get_yticklabels(), names, strict=True):
        label.set(color=style(name).colour, fontweight=style(name).weight)


def _scales(axis: Any, tokens: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_locator(FixedLocator(tokens))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
    )
    low, high = axis.get_ylim()
    steps = (1, 2, 5) if high > 10 * low else (1, 1.2, 1.5, 2, 3, 4, 5, 7)
    axis.yaxis.set_major_locator(LogLocator(subs=steps))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.tick_params(labelsize=8)
    axis.grid(linewidth=0.4, alpha=0.5)


def _names_at_the_end(axis: Any, lines: dict[str, dict[int, float]]) -> None:
    """Beside the last point of each line, moved apart where they would overlap."""
    ends = {name: list(points.items())[-1] for name, points in lines.items()}
    right = max(tokens for tokens, _ in ends.values())
    place = axis.transAxes.inverted()
    heights = {
        name: place.transform(axis.transData.transform(end))[1] for name, end in ends.items()
    }
    for name, height in _apart(heights).items():
        look = style(name)
        axis.annotate(
            name,
            ends[name],
            xytext=(1.05, height),
            textcoords="axes fraction",
            fontsize=_NAME_SIZE,
            color=look.colour,
            fontweight=look.weight,
            verticalalignment="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": look.colour, "linewidth": 0.5, "alpha": 0.6}
            if ends[name][0] == right
            else None,
        )


def _apart(heights: dict[str, float]) -> dict[str, float]:
    """In the same order, no two nearer than a line of text, each as near to its own as can be.

    Names that would overlap form a group, which is centred on the middle of where they belong.
    """
    groups: list[list[str]] = []
    for name in sorted(heights, key=heights.__getitem__):
        groups.append([name])
        while len(groups) > 1 and _span(groups[-2], heights)[1] > _span(groups[-1], heights)[0]:
            groups[-2:] = [groups[-2] + groups[-1]]
    return {
        name: _span(group, heights)[0] + (index + 0.5) * _NAME_GAP
        for group in groups
        for index, name in enumerate(group)
    }


def _span(group: Sequence[str], heights: dict[str, float]) -> tuple[float, float]:
    """The lower and upper edge of a group, inside of the panel."""
    half = len(group) * _NAME_GAP / 2
    middle = sum(heights[name] for name in group) / len(group)
    middle = max(half - _NAME_GAP, min(middle, 1 + _NAME_GAP - half))
    return middle - half, middle + half
