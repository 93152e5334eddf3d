"""Tables of the head: one case, every case in a line, everybody over all cases."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks import text
from benchmarks.figures import BARE, QUOTED, Figures, fastest, figures, is_quoted, leanest
from benchmarks.results import Table
from benchmarks.shapes import DTYPES
from benchmarks.tables.columns import column, in_order, join, names
from benchmarks.work import WORKS


def headline(tables: Sequence[Table], every: bool = False) -> str:
    """Show one case in each dtype that was measured: who is fast, small and exact.

    ``every``: also ours by other schedules and backends.
    """
    by_dtype = {table.dtype: figures(table) for table in in_order(tables)}
    known = [name for rows in by_dtype.values() for name in rows if every or is_quoted(name)]
    first = [name for name in (BARE, *QUOTED) if any(name in x for x in by_dtype.values())]
    order = list(dict.fromkeys([*first, *known]))
    columns = [names(order)]
    for dtype, by_name in by_dtype.items():
        rows = [by_name.get(name) for name in order]
        times = column(f"{dtype}: x bare", rows, lambda x: x.to(BARE), text.ratio)
        for index, x in enumerate(rows):
            if x and x.row.failure:
                times[1][index] = "FAILED"
            elif x and x.name == BARE:
                times[1][index] += f" ({text.duration(x.median)})"
        columns += [
            times,
            column("x ours", rows, lambda x: x.to("ours"), text.ratio),
            column("extra MiB", rows, lambda x: x.extra, text.mib),
            column("value error", rows, lambda x: x.value_error, text.error),
            column("gradient error", rows, lambda x: x.gradient_error, text.error),
        ]
    return f"{caption(tables[0])}\n\n{join(columns)}"


def caption(table: Table) -> str:
    """Write what was measured, where, when and of which commit."""
    environment = table.environment
    return (
        f"{WORKS[table.work].title}; {table.model} (D = {table.hidden}, V = {table.vocabulary}), "
        f"T = {table.tokens}; {environment.where}; {environment.day}, {environment.source}."
    )


def cases(tables: Sequence[Table]) -> str:
    """Show a line per case: ours and the best baseline, in time and in memory."""
    if not tables:
        return ""
    header = [
        "work", "model", "T", "dtype", "bare",
        "x bare: ours", "ours-input", "fastest baseline",
        "extra MiB: ours", "ours-input", "leanest baseline",
    ]  # fmt: skip
    return text.table(header, map(_case, in_order(tables)))


def _case(table: Table) -> list[str]:
    rows = figures(table)
    ours = [rows.get(name) for name in QUOTED]
    bare = rows[BARE].median if BARE in rows else None
    times = column("", [*ours, fastest(rows)], lambda x: x.to(BARE), text.ratio)[1]
    sizes = column("", [*ours, leanest(rows)], lambda x: x.extra, text.mib)[1]
    for cells, best in ((times, fastest(rows)), (sizes, leanest(rows))):
        cells[:2] = [
            "FAILED" if x and x.row.failure else cell
            for x, cell in zip(ours, cells[:2], strict=True)
        ]
        cells[2] += f" {best.name}" if best else ""
    place = [table.work, table.model, str(table.tokens), table.dtype]
    return [*place, text.duration(bare), *times, *sizes]


def standings(tables: Sequence[Table]) -> str:
    """Show a line for each provider, over all of its cases of a dtype."""
    parts = []
    for dtype in DTYPES:
        if found := [figures(table) for table in tables if table.dtype == dtype]:
            parts += [f"{dtype}, {len(found)} cases:", _standings(found)]
    return "\n\n".join(parts)


def _standings(found: Sequence[dict[str, Figures]]) -> str:
    first = (BARE, *QUOTED)

    def place(name: str) -> tuple[int, float]:
        fixed = first.index(name) if name in first else len(first)
        return fixed, statistics.median(_ratios(found, name, BARE) or [math.inf])

    every = sorted(dict.fromkeys(name for rows in found for name in rows), key=place)
    header = [
        "", "cases", "x bare", "x ours", "x ours-input", "extra memory x ours",
        "value error", "gradient error", "same bits: again", "in another batch", "failed",
    ]  # fmt: skip
    return text.table(header, (_standing(name, found) for name in every))


def _standing(name: str, found: Sequence[dict[str, Figures]]) -> list[str]:
    mine = [rows[name] for rows in found if name in rows]
    right = [x for x in mine if not x.row.failure]
    values = [x.value_error for x in right if x.value_error is not None]
    gradients = [x.gradient_error for x in right if x.gradient_error is not None]
    sizes = [(rows[name].extra, rows["ours"].extra) for rows in found if {name, "ours"} <= {*rows}]
    return [
        text.bold(name) if name in QUOTED else name,
        str(sum(x.median is not None for x in mine)),
        *(_middle(_ratios(found, name, base)) for base in (BARE, *QUOTED)),
        _middle([size / ours for size, ours in sizes if size is not None and ours and ours > 0]),
        text.error(max(values, default=None)),
        text.error(max(gradients, default=None)),
        _always([x.row.repeatable for x in mine]),
        _always([x.row.batch_invariant for x in mine]),
        str(len(mine) - len(right) or ""),
    ]


def _ratios(found: Sequence[dict[str, Figures]], name: str, base: str) -> list[float]:
    ratios = (rows[name].to(base) for rows in found if name in rows)
    return [ratio for ratio in ratios if ratio is not None]


def _middle(values: list[float]) -> str:
    return text.spread(values, statistics.median(values)) if values else ""


def _always(values: Sequence[bool | None]) -> str:
    """Write whether it holds in all cases that know."""
    if False in values and True in values:
        return f"all but {list(values).count(False)}"
    return text.yes_no(None if {*values} <= {None} else False not in values)


def schedules(tables: Sequence[Table]) -> str:
    """Show one pass beside two, in the cases that have both, and which of them ``ours`` took."""
    header = ["work", "model", "T", "dtype", "one_pass", "two_pass"]
    header += ["extra MiB: one_pass", "two_pass", "ours takes"]
    lines = []
    for table in in_order(tables):
        rows = figures(table)
        ours, two = rows.get("ours"), rows.get("ours-two-pass")
        # files that do not say are older than the choice
        chosen = (ours.row.schedule or "one_pass") if ours else ""
        one = ours if chosen == "one_pass" else rows.get("ours-one-pass")
        if not (one and two and one.median and two.median):
            continue
        times = column("", [one, two], lambda x: x.median, text.duration)[1]
        sizes = column("", [one, two], lambda x: x.extra, text.mib)[1]
        place = [table.work, table.model, str(table.tokens), table.dtype]
        lines.append([*place, *times, *sizes, chosen])
    return text.table(header, lines) if lines else ""
