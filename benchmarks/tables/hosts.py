"""The table of other trainers' steps, with their own head and with ours."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks import text
from benchmarks.hosts import WORKS
from benchmarks.hosts.work import NO_HEAD, THEIRS
from benchmarks.results import HostRow, HostTable
from benchmarks.tables.columns import error_list, join


def hosts(tables: Sequence[HostTable]) -> str:
    """Show a line for each way to take a step."""
    tables = sorted((x for x in tables if x.version), key=lambda x: list(WORKS).index(_name(x)))
    lines = [(table, row) for table in tables for row in table.rows if row.provider != NO_HEAD]
    if not lines:
        return ""
    columns = [
        ("", [_of_first(f"{x.host} {x.version}: {x.step}", row) for x, row in lines]),
        ("", [text.bold(x) if (x := row.provider) != THEIRS else x for _, row in lines]),
        ("step", [_time(*line) for line in lines]),
        ("the head in it", [_head(*line) for line in lines]),
        ("MiB grown", [text.mib(row.memory) for _, row in lines]),
        ("difference from theirs", [error_list(row.errors) for _, row in lines]),
    ]
    return f"{_caption(tables[-1])}\n\n{join(columns)}"


def _name(table: HostTable) -> str:
    return f"{table.host}: {table.step}"


def _of_first(name: str, row: HostRow) -> str:
    return name if row.provider == THEIRS else ""


def _caption(table: HostTable) -> str:
    environment = table.environment
    assert environment is not None
    return (
        f"A forward and backward of a model or head ({table.model}), {table.tokens} tokens in a "
        f"trainer's step (pairs have two completions), {table.dtype}. {environment.where}; "
        f"{environment.day}, {environment.source}."
    )


def _time(table: HostTable, row: HostRow) -> str:
    if row.failure:
        return f"FAILED: {row.failure}"
    seconds, base = median(row.seconds), _median(table, THEIRS)
    if row.provider == THEIRS or base is None:
        return text.duration(seconds)
    return f"x {text.ratio(seconds / base)}"


def _head(table: HostTable, row: HostRow) -> str:
    """Write the time of the head, less what the step takes without one, against theirs."""
    rest, base = _median(table, NO_HEAD), _median(table, THEIRS)
    if row.failure or rest is None or base is None:
        return ""
    head = median(row.seconds) - rest
    return (
        text.duration(head) if row.provider == THEIRS else f"x {text.ratio(head / (base - rest))}"
    )


def _median(table: HostTable, arm: str) -> float | None:
    return next((median(r.seconds) for r in table.rows if r.provider == arm and r.seconds), None)
