"""Pictures of a device's results: time and memory over T, and errors. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import text
from benchmarks.providers import PROVIDERS
from benchmarks.providers.base import is_ours
from benchmarks.results import Group, Row
from benchmarks.shapes import DTYPES, WORKS
from benchmarks.tables import BARE, QUOTED, in_order

_WORK = "dapo"  # the one that is drawn
_OUTPUTS = ("loss", "dhidden", "dweight")
_LEAST_BYTES = 2.0**20  # a logarithm needs more than 0
_COLOURS = {BARE: "#111111", "ours": "#0050d8", "ours-input": "#2f9bff"}
Value = Callable[[Group, Row], float | None]


def save_plots(groups: Sequence[Group], folder: Path) -> None:
    """Draw all of them; a picture that no result supports any more is deleted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    wanted = [x for x in groups if x.benchmark == "heads" and x.facts["work"] == _WORK]
    for name, (title, draw) in PLOTS.items():
        if figure := draw(in_order(wanted)) if wanted else None:
            title = f"{title}: {WORKS[_WORK].title} ({wanted[0].environment['device']})"
            figure.suptitle(title, fontsize=11, fontweight="bold")
            # without the version and the date the same results give the same file
            figure.savefig(folder / f"{name}.png", dpi=100, metadata={"Software": None})
            plt.close(figure)
        else:
            (folder / f"{name}.png").unlink(missing_ok=True)


def _time(groups: Sequence[Group]) -> Any:
    return _over_tokens(groups, "x bare GEMMs", lambda group, row: group.ratio(row, BARE))


def _memory(groups: Sequence[Group]) -> Any:
    def extra(group: Group, row: Row) -> float | None:
        size = row.info.get("extra_bytes")
        return None if size is None or not row.runs else max(size, _LEAST_BYTES) / 2**20

    return _over_tokens(groups, "MiB", extra)


def _over_tokens(groups: Sequence[Group], unit: str, value: Value) -> Any:
    """Draw a panel per head and dtype: a curve for each provider, or bars where there is one T."""
    from matplotlib.ticker import FuncFormatter

    panels: dict[str, dict[str, dict[int, float]]] = {}  # by title, provider and T
    for group in groups:
        panel = panels.setdefault(f"{group.facts['model']}, {group.facts['dtype']}", {})
        for row in group.rows:
            if (found := value(group, row)) is not None:
                panel.setdefault(row.provider, {})[group.facts["tokens"]] = found
    panels = {title: curves for title, curves in panels.items() if curves}
    if not panels:
        return None
    figure, axes = _panels(-(-len(panels) // 2), min(2, len(panels)), 5.5, 4.0)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
        axis.set_title(title, fontsize=9, loc="left")
        if {len(curve) for curve in curves.values()} == {1}:
            bars = {provider: next(iter(curve.values())) for provider, curve in curves.items()}
            _bars(axis, dict(sorted(bars.items(), key=lambda bar: bar[1])), text.digits)
            axis.set_xlabel(f"{unit}, T = {next(iter(next(iter(curves.values()))))}", fontsize=8)
            continue
        for name, curve in curves.items():
            strong, style = name in QUOTED, ":" if is_ours(name) else "-"
            axis.plot(
                list(curve), list(curve.values()), label=name, color=_colour(name),
                marker="o" if strong else ".", linewidth=2.8 if strong else 1.2,
                linestyle="--" if name == BARE else "-" if strong else style,
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            scale.set_minor_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axis.tick_params(labelsize=7, which="both")
        axis.set_xlabel("T, tokens", fontsize=8)
        axis.set_ylabel(unit, fontsize=8)
        axis.grid(linewidth=0.4, alpha=0.5)
        axis.legend(fontsize=6.5, ncols=2, framealpha=0.5)
    return figure


def _accuracy(groups: Sequence[Group]) -> Any:
    """Draw a row of panels per dtype, one per output: of the largest case that most have."""
    chosen: dict[str, Group] = {}
    for group in groups:  # the largest is the last
        best = chosen.get(group.facts["dtype"])
        if best is None or len(_errors(group, "loss")) >= len(_errors(best, "loss")):
            chosen[group.facts["dtype"]] = group
    figure, axes = _panels(len(chosen), len(_OUTPUTS), 3.2, 3.8)
    dtypes = [dtype for dtype in DTYPES if dtype in chosen]
    for line, group in zip(axes, map(chosen.__getitem__, dtypes), strict=True):
        for axis, output in zip(line, _OUTPUTS, strict=True):
            errors, facts = _errors(group, output), group.facts
            _bars(axis, errors, text.error)
            axis.set_xscale("symlog", linthresh=min([x for x in errors.values() if x] or [1.0]))
            axis.set_xticks([])
            axis.set_title(f"{output}, {facts['dtype']}", fontsize=9, loc="left")
            axis.set_xlabel(f"{facts['model']}, T = {facts['tokens']}; {group.about}", fontsize=6.5)
    return figure


def _errors(group: Group, output: str) -> dict[str, float]:
    """Return errors by provider, ours first, of those that are right."""
    found = {row.provider: row.errors[output] for row in group.rows if row.runs and row.errors}
    return dict(sorted(found.items(), key=lambda item: not is_ours(item[0])))


def _bars(axis: Any, values: dict[str, float], write: Callable[[float], str]) -> None:
    """Draw the first on top, with a number at its end."""
    drawn = axis.barh(list(values), list(values.values()), color=[_colour(x) for x in values])
    axis.bar_label(drawn, [write(value) for value in values.values()], padding=3, fontsize=7)
    axis.invert_yaxis()
    axis.tick_params(labelsize=7)
    axis.margins(x=0.25)


def _panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    size = (columns * width, rows * height + 0.4)
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def _colour(name: str) -> Any:
    """Give a provider its colour, the same in every picture: ours is blue."""
    import matplotlib

    known = [x for x in PROVIDERS if x not in _COLOURS]
    index = known.index(name) if name in known else len(known)
    return _COLOURS.get(name) or matplotlib.colormaps["tab20"](index % 20)


# what a picture shows, and what draws it
PLOTS = {
    "time": ("Time over the number of tokens", _time),
    "memory": ("Extra memory over the number of tokens", _memory),
    "accuracy": ("Errors by output and provider, shorter is better", _accuracy),
}
