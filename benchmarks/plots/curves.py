"""Time and memory over the number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import text
from benchmarks.derive import FLOOR, Figures, figures, logits_mib
from benchmarks.load import Table
from benchmarks.overview import in_order
from benchmarks.plots.axes import Panel, bars, curves, figure_of
from benchmarks.plots.style import LOGITS
from benchmarks.work import WORKS

_WORK = "dapo"  # the one that is drawn, where it was measured
_LEAST_MIB = 1.0  # a logarithm needs more than 0
Value = Callable[[Figures], float | None]


def draw_time(tables: Sequence[Table]) -> Any:
    """Over T: the time, and how many times that of the floor. One T alone: bars."""
    groups = _groups(tables)
    panels = []
    for name, group in _long(groups):
        unit = text.unit_for(min(points.values()) for points in _lines(group, _seconds).values())
        lines = _lines(group, _seconds, unit.seconds)
        failed = _failed(group)
        panels += [
            curves(f"{name}: time", unit.name, lines, names=False, failed=failed),
            curves(f"{name}: time / floor", "x floor", _lines(group, _to_floor)),
        ]
    panels += [_time_bars(name, table) for name, table in _short(groups)]
    return _figure(panels, groups, "Time")


def draw_memory(tables: Sequence[Table]) -> Any:
    """Peak beyond inputs and results over T. One T alone: bars."""
    groups = _groups(tables)
    panels = []
    for name, group in _long(groups):
        if lines := _lines(group, _extra):
            lines[LOGITS] = {table.tokens: logits_mib(table) for table in group}
            panels.append(curves(f"{name}: extra memory", "MiB", lines, failed=_failed(group)))
    panels += [panel for name, table in _short(groups) if (panel := _memory_bars(name, table))]
    return _figure(panels, groups, "Extra memory")


def _groups(tables: Sequence[Table]) -> dict[str, list[Table]]:
    """The tables of one work, by model and dtype, T ascending."""
    works = [table.work for table in tables]
    work = _WORK if _WORK in works else max(works, key=works.count, default=None)
    groups: dict[str, list[Table]] = {}
    for table in in_order([table for table in tables if table.work == work]):
        groups.setdefault(f"{table.model}, {table.dtype}", []).append(table)
    return groups


def _long(groups: dict[str, list[Table]]) -> list[tuple[str, list[Table]]]:
    return [(name, group) for name, group in groups.items() if len(group) > 1]


def _short(groups: dict[str, list[Table]]) -> list[tuple[str, Table]]:
    return [
        (f"{name}, T = {group[0].tokens}", group[0])
        for name, group in groups.items()
        if len(group) == 1
    ]


def _lines(group: list[Table], value: Value, unit: float = 1.0) -> dict[str, dict[int, float]]:
    """Provider -> T -> value."""
    lines: dict[str, dict[int, float]] = {}
    for table in group:
        for name, row in figures(table).items():
            if (y := value(row)) is not None:
                lines.setdefault(name, {})[table.tokens] = y / unit
    return lines


def _failed(group: Sequence[Table]) -> list[str]:
    """Those whose result was wrong, or who raised, at any T."""
    return list(dict.fromkeys(row.provider for table in group for row in table.rows if row.failure))


def _seconds(row: Figures) -> float | None:
    return row.times.median if row.times else None


def _to_floor(row: Figures) -> float | None:
    return row.times.to.get(FLOOR) if row.times else None


def _extra(row: Figures) -> float | None:
    return None if row.extra is None else max(row.extra, _LEAST_MIB)


def _time_bars(name: str, table: Table) -> Panel:
    rows = figures(table)
    values = {provider: x.times.median for provider, x in rows.items() if x.times}
    unit = text.unit_for(values.values())
    labels = {
        provider: f"{unit.of(value)} {unit.name}, {text.ratio(_to_floor(rows[provider]))} x floor"
        for provider, value in values.items()
    }
    scaled = {provider: value / unit.seconds for provider, value in values.items()}
    return bars(f"{name}: time", unit.name, scaled, labels, _failed([table]))


def _memory_bars(name: str, table: Table) -> Panel | None:
    values = {provider: x.extra for provider, x in figures(table).items() if x.extra is not None}
    labels = {provider: f"{text.mib(value)} MiB" for provider, value in values.items()}
    return (
        bars(f"{name}: extra memory", "MiB", values, labels, _failed([table])) if values else None
    )


def _figure(panels: list[Panel], groups: dict[str, list[Table]], what: str) -> Any:
    if not panels:
        return None
    table = next(iter(groups.values()))[0]
    title = f"{what}: {WORKS[table.work].title} ({table.environment.device})"
    return figure_of(panels, title)
