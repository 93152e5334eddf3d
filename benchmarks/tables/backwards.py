"""Tables of the backwards: a line for each in each work, for every kind of inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median

from benchmarks import text
from benchmarks.backwards.providers import BARE_WORK, WAYS
from benchmarks.figures import within
from benchmarks.results import BackwardsRow, BackwardsTable
from benchmarks.shapes import DTYPES, SPREADS
from benchmarks.tables.columns import Column, join
from benchmarks.work import WORKS

_LEGEND = (
    "x P: time of forward and backward over that of the bare GEMM of the logits, in the same run. "
    "dhidden and dweight: norm of the difference over the norm. entries: how many of a row the "
    "forward keeps, of rows that are not exact; exact: those that are."
)
_WORKS = (BARE_WORK, *WAYS)
_SURE = "p > 0.98"


def backwards(tables: Sequence[BackwardsTable]) -> str:
    """Show a table for each kind of inputs of a head, with every dtype in it."""
    cases: dict[tuple[str, int, str], list[BackwardsTable]] = {}
    for table in sorted(tables, key=lambda x: (list(SPREADS).index(x.inputs) - 1) % len(SPREADS)):
        cases.setdefault((table.model, table.tokens, table.inputs), []).append(table)
    parts = [f"{_caption(of)}\n\n{_lines(of)}" for of in map(_by_dtype, cases.values())]
    return "\n\n".join([_LEGEND, *parts, _notes(tables)]) if parts else ""


def _by_dtype(tables: list[BackwardsTable]) -> list[BackwardsTable]:
    return sorted(tables, key=lambda table: list(DTYPES).index(table.dtype))


def _caption(tables: Sequence[BackwardsTable]) -> str:
    one, environment = tables[0], tables[0].environment
    assert environment is not None
    sure = 100 * len(within(_SURE, one.logprobs)) / len(one.logprobs)
    return (
        f"{one.inputs}: entropies of {text.digits(fmean(one.entropy), 2)} nats in the mean, "
        f"at most {text.digits(max(one.entropy), 2)}; {sure:.0f} % {_SURE}. {one.model} "
        f"(D = {one.hidden}, V = {one.vocabulary}), T = {one.tokens}; errors against "
        f"{one.reference}. {environment.where}; {environment.day}, {environment.source}."
    )


def _lines(tables: Sequence[BackwardsTable]) -> str:
    known = {(row.work, row.provider): row for table in tables for row in table.rows}
    lines = sorted(
        (place for place, row in known.items() if row.absent is None and row.unable is None),
        key=lambda place: _WORKS.index(place[0]),
    )
    columns: list[Column] = [
        ("", [work for work, _ in lines]),
        ("", [text.bold(name) if name.startswith("ours") else name for _, name in lines]),
    ]
    for table in tables:
        columns += _columns(table, lines)
    return join(columns)


def _columns(table: BackwardsTable, lines: Sequence[tuple[str, str]]) -> list[Column]:
    rows = {(row.work, row.provider): row for row in table.rows}
    bare = next((median(row.seconds) for row in table.rows if row.work == BARE_WORK), None)

    def cells(title: str, write: Callable[[BackwardsRow], str]) -> Column:
        return title, [write(rows[place]) if place in rows else "" for place in lines]

    def time(row: BackwardsRow) -> str:
        if row.failure or not row.seconds or not bare:
            return "FAILED" if row.failure else ""
        seconds = median(row.seconds)
        measured = f" ({text.duration(seconds)})" if row.work == BARE_WORK else ""
        return text.ratio(seconds / bare) + measured

    return [
        cells(f"{table.dtype}: x P", time),
        cells("extra MiB", lambda row: text.mib(row.memory.extra if row.memory else None)),
        cells("dhidden", lambda row: text.error(row.errors.get("dhidden"))),
        cells("dweight", lambda row: text.error(row.errors.get("dweight"))),
        cells("entries: mean (max)", _entries),
        cells("exact, %", _exact),
    ]


def _entries(row: BackwardsRow) -> str:
    kept = [count for count in row.entries if count >= 0]
    return f"{text.digits(fmean(kept), 2)} ({max(kept)})" if kept else ""


def _exact(row: BackwardsRow) -> str:
    whole = sum(count < 0 for count in row.entries)
    return text.digits(100 * whole / len(row.entries), 2) if row.entries else ""


def _notes(tables: Sequence[BackwardsTable]) -> str:
    """Say what each work and each of our lines is."""
    rows = [row for table in tables for row in table.rows]
    works = [f"* `{work}`: {WORKS[work].title}" for work in _WORKS if work != BARE_WORK]
    ours = {row.provider: row.note for row in rows if row.provider.startswith("ours-")}
    return "\n".join([*works, *(f"* `{name}`: {note}" for name, note in ours.items())])
