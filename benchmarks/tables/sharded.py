"""The table of a step over several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks import text
from benchmarks.results import ShardedRow, ShardedTable
from benchmarks.tables.columns import error_list, join, with_missing
from benchmarks.work import WORKS

_BASE = "one process"
_STATS_BYTES = 4 * 8  # of a row: logsumexp, entropy, score of the target, whose it is; fp64


def sharded(tables: Sequence[ShardedTable]) -> str:
    """Show a table for each case."""
    return "\n\n".join(f"{_caption(table)}\n\n{_lines(table)}" for table in tables)


def _caption(table: ShardedTable) -> str:
    environment = table.environment
    assert environment is not None
    return (
        f"{WORKS[table.work].title}, {table.model} (D = {table.hidden}, V = {table.vocabulary}), "
        f"T = {table.tokens} in all, {table.dtype}, {table.ranks} ranks over gloo on one machine, "
        f"one thread each; errors against {table.reference}. {environment.where}; "
        f"{environment.day}, {environment.source}."
    )


def _lines(table: ShardedTable) -> str:
    rows = [row for row in table.rows if row.absent is None]
    base = next((median(r.seconds) for r in rows if r.provider == _BASE and r.seconds), None)

    def time(row: ShardedRow) -> str:
        if row.failure or not row.seconds or base is None:
            return f"FAILED: {row.failure}" if row.failure else ""
        seconds = median(row.seconds)
        measured = f" ({text.duration(seconds)})" if row.provider == _BASE else ""
        return text.ratio(seconds / base) + measured

    formula = table.tokens * (_STATS_BYTES + 4 * table.hidden)
    columns = [
        ("", [text.bold(x) if (x := r.provider).startswith("ours") else x for r in rows]),
        ("", [row.note for row in rows]),
        (f"x {_BASE}", [time(row) for row in rows]),
        ("MiB a rank grows", [text.mib(row.memory) for row in rows]),
        (
            "bytes sent (of T (32 + 4 D))",
            [f"{x} ({x / formula:.4f})" if (x := r.sent) else "" for r in rows],
        ),
        ("errors", [error_list(row.errors) for row in rows]),
    ]
    return with_missing(join(columns), table.rows)
