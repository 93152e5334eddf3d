"""The tables that are read first: every case in a line, and one case in all its dtypes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import text
from benchmarks.derive import (
    FLOOR,
    QUOTED,
    Figures,
    case,
    fastest_peer,
    figures,
    is_ours,
    leanest_peer,
)
from benchmarks.load import Table
from benchmarks.shapes import DTYPES, MODELS
from benchmarks.work import WORKS


def in_order(tables: Sequence[Table]) -> list[Table]:
    """By work, then as the models, lengths and dtypes are listed."""
    works, models, dtypes = list(WORKS), list(MODELS), list(DTYPES)

    def place(table: Table) -> tuple[int, int, int, int]:
        known = models.index(table.model) if table.model in models else len(models)
        return works.index(table.work), known, table.tokens, dtypes.index(table.dtype)

    return sorted(tables, key=place)


def summary(tables: Sequence[Table], report: str = "") -> str:
    """A line per case: ours and the best peer, in time and in memory; linked into ``report``."""
    header = [
        "work", "model", "T", "dtype", "floor",
        "x floor: ours", "ours-input", "fastest peer",
        "extra MiB: ours", "ours-input", "leanest peer",
    ]  # fmt: skip
    lines = (_line(table, report) for table in in_order(tables))
    return text.markdown_table(*text.without_empty(header, lines))


def _line(table: Table, report: str) -> list[str]:
    rows = figures(table)
    ours = [rows.get(name) for name in QUOTED]
    fastest, leanest = fastest_peer(rows), leanest_peer(rows)
    floor = rows[FLOOR].times if FLOOR in rows else None
    ratios = [_to_floor(x) for x in (*ours, fastest)]
    sizes = [x.extra if x else None for x in (*ours, leanest)]
    return [
        f"[{table.work}]({report}#{text.anchor(str(case(table)))})",
        table.model,
        str(table.tokens),
        table.dtype,
        text.duration(floor.median) if floor else "",
        *_best([*ours, fastest], ratios, [text.ratio(x) for x in ratios]),
        *_best([*ours, leanest], sizes, [text.mib(x) for x in sizes]),
    ]


def _best(
    rows: Sequence[Figures | None], values: Sequence[float | None], texts: Sequence[str]
) -> list[str]:
    """The cells of ours and of the best peer, which is named; the least in bold."""
    cells = text.bold_least(values, texts)
    peer = rows[-1]
    ours = [
        "FAILED" if x and x.row.failure else cell
        for cell, x in zip(cells[:-1], rows[:-1], strict=True)
    ]
    return [*ours, f"{cells[-1]} {peer.row.provider}" if peer else ""]


def _to_floor(x: Figures | None) -> float | None:
    return x.times.to.get(FLOOR) if x and x.times else None


def headline(tables: Sequence[Table]) -> str:
    """One case, in each dtype that was measured: who is fast, small and exact.

    Of ours only the rows that are quoted: the others are schedules and backends.
    """
    rows = {table.dtype: figures(table) for table in in_order(tables)}
    names = dict.fromkeys(
        name
        for by_name in rows.values()
        for name in (FLOOR, *QUOTED, *by_name)
        if name in by_name and (name in QUOTED or not is_ours(name))
    )
    order = [name for name in (FLOOR, *QUOTED) if name in names]
    order += [name for name in names if name not in order]
    header = [""]
    columns = [[text.bold(name) if name in QUOTED else name for name in order]]
    for dtype, by_name in rows.items():
        header += [f"{dtype}: x floor", "x ours", "extra MiB", "value error", "gradient error"]
        columns += _columns([by_name.get(name) for name in order])
    return text.markdown_table(*text.without_empty(header, zip(*columns, strict=True)))


def _columns(rows: Sequence[Figures | None]) -> list[list[str]]:
    """Of one dtype; the best beside the floor in bold."""
    to_floor = [_to_floor(x) for x in rows]
    to_ours = [x.times.to.get(QUOTED[0]) if x and x.times else None for x in rows]
    extra = [x.extra if x else None for x in rows]
    values = [x.value_error if x else None for x in rows]
    gradients = [x.gradient_error if x else None for x in rows]
    columns = []
    for numbers, write in (
        (to_floor, text.ratio), (to_ours, text.ratio), (extra, text.mib),
        (values, text.error), (gradients, text.error),
    ):  # fmt: skip
        ranked = [None if _is_floor(x) else v for x, v in zip(rows, numbers, strict=True)]
        columns.append(text.bold_least(ranked, [write(value) for value in numbers]))
    for index, x in enumerate(rows):
        if x and x.row.failure:
            columns[0][index] = "FAILED"
        elif _is_floor(x) and x and x.times:
            columns[0][index] += f" ({text.duration(x.times.median)})"
    return columns


def _is_floor(x: Figures | None) -> bool:
    return x is not None and x.row.provider == FLOOR
