"""Pictures of a device's results: time and memory over T, and errors. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import text
from benchmarks.figures import BARE, QUOTED, Figures, figures, is_ours
from benchmarks.results import Table
from benchmarks.shapes import DTYPES
from benchmarks.tables.columns import in_order
from benchmarks.work import WORKS

_WORK = "dapo"  # the one that is drawn, where it was measured
_OUTPUTS = ("loss", "logprobs", "entropy", "dhidden", "dweight")
_LEAST_BYTES = 2.0**20  # a logarithm needs more than 0
Value = Callable[[Figures], float | None]


def save_plots(tables: Sequence[Table], folder: Path) -> None:
    """Draw all of them; a picture that no result supports any more is deleted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for name, (_, draw) in PLOTS.items():
        figure = draw(tables) if tables else None
        if figure is None:
            (folder / f"{name}.png").unlink(missing_ok=True)
            continue
        # without the version and the date the same results give the same file
        figure.savefig(folder / f"{name}.png", dpi=100, metadata={"Software": None})
        plt.close(figure)


def _time(tables: Sequence[Table]) -> Any:
    return _over_tokens(tables, "Time", "x bare GEMMs", lambda x: x.to(BARE))


def _memory(tables: Sequence[Table]) -> Any:
    def extra(x: Figures) -> float | None:
        return None if x.extra is None else max(x.extra, _LEAST_BYTES) / 2**20

    return _over_tokens(tables, "Extra memory", "MiB", extra)


def _over_tokens(tables: Sequence[Table], what: str, unit: str, value: Value) -> Any:
    """Draw a panel per head and dtype: a curve for each provider, or bars where there is one T."""
    works = [table.work for table in tables]
    work = _WORK if _WORK in works else max(works, key=works.count)
    groups: dict[str, list[Table]] = {}
    for table in in_order(table for table in tables if table.work == work):
        groups.setdefault(f"{table.model}, {table.dtype}", []).append(table)
    groups = {name: g for name, g in groups.items() if any(map(len, _points(g, value).values()))}
    if not groups:
        return None
    figure, axes = _panels(-(-len(groups) // 2), min(2, len(groups)), 5.5, 4.0)
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    for axis, (name, group) in zip(axes.flat, groups.items(), strict=False):
        if failed := {r.provider for table in group for r in table.rows if r.failure}:
            name += f"\nFAILED: {', '.join(sorted(failed))}"
        axis.set_title(name, fontsize=9, loc="left")
        points = _points(group, value)
        if len(group) > 1:
            _curves(axis, points, unit)
        else:
            bars = {provider: next(iter(line.values())) for provider, line in points.items()}
            _bars(axis, dict(sorted(bars.items(), key=lambda item: item[1])), text.digits)
            axis.set_xlabel(f"{unit}, T = {group[0].tokens}", fontsize=8)
    device = tables[0].environment.device
    figure.suptitle(f"{what}: {WORKS[work].title} ({device})", fontsize=11, fontweight="bold")
    return figure


def _points(group: Sequence[Table], value: Value) -> dict[str, dict[int, float]]:
    """Return values by provider and T."""
    points: dict[str, dict[int, float]] = {}
    for table in group:
        for name, row in figures(table).items():
            if (y := value(row)) is not None:
                points.setdefault(name, {})[table.tokens] = y
    return points


def _curves(axis: Any, points: dict[str, dict[int, float]], unit: str) -> None:
    from matplotlib.ticker import FuncFormatter

    for name, line in points.items():
        axis.plot(
            list(line), list(line.values()), label=name, color=_colour(name),
            marker="o" if name in QUOTED else ".", linewidth=2.8 if name in QUOTED else 1.2,
            linestyle="--" if name == BARE else "-" if name in QUOTED or not is_ours(name) else ":",
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


def _bars(axis: Any, values: dict[str, float], write: Callable[[float], str]) -> None:
    """Draw the first on top, with a number at its end."""
    drawn = axis.barh(list(values), list(values.values()), color=[_colour(x) for x in values])
    axis.bar_label(drawn, [write(value) for value in values.values()], padding=3, fontsize=7)
    axis.invert_yaxis()
    axis.tick_params(labelsize=7)
    axis.margins(x=0.25)


def _accuracy(tables: Sequence[Table]) -> Any:
    """Draw a row of panels per dtype, one per output: of the case that most providers have."""
    chosen = {
        (dtype, output): found
        for dtype in DTYPES
        for output in _OUTPUTS
        if (found := _widest([t for t in tables if t.dtype == dtype], output))
    }
    if not chosen:
        return None
    dtypes = list(dict.fromkeys(dtype for dtype, _ in chosen))
    outputs = [name for name in _OUTPUTS if any(output == name for _, output in chosen)]
    figure, axes = _panels(len(dtypes), len(outputs), 3.2, 3.8)
    for row, dtype in zip(axes, dtypes, strict=True):
        for axis, output in zip(row, outputs, strict=True):
            if (table := chosen.get((dtype, output))) is None:
                axis.set_visible(False)
                continue
            errors = _errors(table, output)
            _bars(axis, errors, text.error)
            axis.set_xscale("symlog", linthresh=min([x for x in errors.values() if x] or [1.0]))
            axis.set_xticks([])
            axis.set_title(f"{output}, {dtype}", fontsize=9, loc="left")
            axis.set_xlabel(f"{table.work}, {table.model}, T = {table.tokens}", fontsize=6.5)
    table = next(iter(chosen.values()))
    title = f"Error against {table.reference}, shorter is better ({table.environment.device})"
    figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure


def _widest(tables: Sequence[Table], output: str) -> Table | None:
    found = [table for table in tables if _errors(table, output)]
    return max(
        found,
        key=lambda x: (
            len(_errors(x, output)),
            x.work == _WORK,
            x.tokens * x.vocabulary * x.hidden,
        ),
        default=None,
    )


def _errors(table: Table, output: str) -> dict[str, float]:
    """Return errors by provider, ours first, of those that did not fail."""
    rows = (x.row for x in figures(table).values() if not x.row.failure)
    found = {row.provider: row.errors[output] for row in rows if output in row.errors}
    return dict(sorted(found.items(), key=lambda item: not is_ours(item[0])))


def _panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    size = (columns * width, rows * height + 0.4)
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def _colour(name: str) -> Any:
    """Give a provider its colour, the same in every picture: ours is blue."""
    import matplotlib

    from benchmarks.providers import PROVIDERS

    fixed = {BARE: "#111111", "ours": "#0050d8", "ours-input": "#2f9bff"}
    known = [x for x in PROVIDERS if x not in fixed]
    index = known.index(name) if name in known else len(known)
    return fixed.get(name) or matplotlib.colormaps["tab20"](index % 20)


# what a picture shows, and what draws it
PLOTS = {
    "time": ("time over the number of tokens", _time),
    "memory": ("extra memory over the number of tokens", _memory),
    "accuracy": ("errors by output and provider", _accuracy),
}
