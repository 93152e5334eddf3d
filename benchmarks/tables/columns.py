"""Cells of a column, and what stands under a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks import text
from benchmarks.figures import BARE, QUOTED
from benchmarks.results import Line
from benchmarks.shapes import DTYPES, MODELS
from benchmarks.work import WORKS

Column = tuple[str, list[str]]  # a title, and a cell for each row


def column(
    title: str,
    rows: Sequence[Any],  # anything with a ``name``, or None for who is not there
    value: Callable[[Any], float | None],
    write: Callable[[float | None], str],
) -> Column:
    """Write a column, the least in bold but for the bare GEMMs."""
    values = [None if x is None else value(x) for x in rows]
    ranked = [None if x is None or x.name == BARE else v for x, v in zip(rows, values, strict=True)]
    return title, text.bold_least(ranked, [write(v) for v in values])


def names(rows: Iterable[str]) -> Column:
    """Write the first column."""
    return "", [text.bold(name) if name in QUOTED else name for name in rows]


def join(columns: Sequence[Column]) -> str:
    return text.table([title for title, _ in columns], zip(*(c for _, c in columns), strict=True))


def error_list(errors: dict[str, float]) -> str:
    return ", ".join(f"{name} {text.error(value)}" for name, value in errors.items())


def with_missing(table: str, rows: Sequence[Line]) -> str:
    """Add who is not in a table, by reason."""
    absent = by_reason((row.provider, row.absent) for row in rows)
    unable = by_reason((row.provider, row.unable) for row in rows if row.absent is None)
    parts = [f"Not here: {absent}." if absent else "", f"Not able: {unable}." if unable else ""]
    return "\n\n".join(filter(None, [table, " ".join(filter(None, parts))]))


def by_reason(reasons: Iterable[tuple[str, str | None]]) -> str:
    """Write names, each group with the reason in brackets; not those without one."""
    found: dict[str, list[str]] = {}
    for provider, reason in reasons:
        if reason is not None:
            found.setdefault(reason, []).append(provider)
    return "; ".join(f"{', '.join(who)} ({why})" for why, who in found.items())


def in_order(tables: Iterable[Any]) -> list[Any]:
    """Sort by work, then as the models, lengths and dtypes are listed."""
    models = list(MODELS)

    def place(table: Any) -> tuple[int, ...]:
        model = models.index(table.model) if table.model in models else len(models)
        return list(WORKS).index(table.work), model, table.tokens, list(DTYPES).index(table.dtype)

    return sorted(tables, key=place)
