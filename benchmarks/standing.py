"""Where everybody stands over all cases of a device, and where we are ahead or behind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import text
from benchmarks.derive import FLOOR, QUOTED, Figures, case, fastest_peer, figures
from benchmarks.load import Table
from benchmarks.overview import in_order
from benchmarks.shapes import DTYPES

_SHOWN = 8  # lines of a list
Rows = dict[str, Figures]


def standings(tables: Sequence[Table]) -> str:
    """Per dtype a line for each provider: all its cases beside floor and ours."""
    parts = []
    for dtype in DTYPES:
        if cases := [figures(table) for table in tables if table.dtype == dtype]:
            parts += [f"{dtype}, {len(cases)} cases:", _standings(cases)]
    return "\n\n".join(parts)


def _standings(cases: Sequence[Rows]) -> str:
    seen = dict.fromkeys(name for rows in cases for name in rows)
    names = sorted(seen, key=lambda name: _place(name, cases))
    header = [
        "", "cases", "x floor", "x ours", "x ours-input", "extra memory x ours",
        "value error", "gradient error", "same bits: again", "in another batch", "failed",
    ]  # fmt: skip
    return text.markdown_table(*text.without_empty(header, (_line(x, cases) for x in names)))


def _place(name: str, cases: Sequence[Rows]) -> tuple[int, float]:
    """The floor, the rows that are quoted, then by time."""
    fixed = (FLOOR, *QUOTED)
    first = fixed.index(name) if name in fixed else len(fixed)
    return first, statistics.median(_ratios(cases, name, FLOOR) or [math.inf])


def _line(name: str, cases: Sequence[Rows]) -> list[str]:
    mine = [rows[name] for rows in cases if name in rows]
    right = [x for x in mine if not x.row.failure]
    values = [x.value_error for x in right if x.value_error is not None]
    gradients = [x.gradient_error for x in right if x.gradient_error is not None]
    failures = sum(x.row.failure is not None for x in mine)
    return [
        text.bold(name) if name in QUOTED else name,
        str(sum(x.times is not None for x in mine)),
        *(_range(_ratios(cases, name, base)) for base in (FLOOR, *QUOTED)),
        _range(_extra_ratios(cases, name)),
        text.error(max(values, default=None)),
        text.error(max(gradients, default=None)),
        _always([x.row.repeatable for x in mine]),
        _always([x.row.batch_invariant for x in mine]),
        str(failures) if failures else "",
    ]


def _ratios(cases: Sequence[Rows], name: str, base: str) -> list[float]:
    timed = (rows[name].times for rows in cases if name in rows)
    return [x.to[base] for x in timed if x and base in x.to]


def _extra_ratios(cases: Sequence[Rows], name: str) -> list[float]:
    pairs = [
        (rows[name].extra, rows[QUOTED[0]].extra) for rows in cases if {name, QUOTED[0]} <= {*rows}
    ]
    return [extra / ours for extra, ours in pairs if extra is not None and ours and ours > 0]


def _range(values: list[float]) -> str:
    """The median, and from which to which."""
    if not values:
        return ""
    middle = text.ratio(statistics.median(values))
    ends = text.ratio(min(values)), text.ratio(max(values))
    return middle if ends[0] == ends[1] else f"{middle} ({ends[0]} to {ends[1]})"


def _always(values: Sequence[bool | None]) -> str:
    """Whether it holds in all cases that know."""
    if False in values:
        wrong = values.count(False)
        return "no" if True not in values else f"all but {wrong}"
    return text.yes_no(True in values or None)


@dataclass(frozen=True, kw_only=True)
class Duel:
    """One of our rows beside the fastest peer of its case."""

    case: str
    peer: str
    ratio: float  # the peer's median over ours


def duels(tables: Sequence[Table], provider: str) -> list[Duel]:
    """In every case that both have."""
    found = []
    for table in in_order(tables):
        rows = figures(table)
        peer = fastest_peer(rows)
        if peer and peer.times and provider in peer.times.to:
            name, ratio = peer.row.provider, peer.times.to[provider]
            found.append(Duel(case=str(case(table)), peer=name, ratio=ratio))
    return found


def ahead(tables: Sequence[Table], provider: str) -> str:
    """The cases in which no peer is as fast, widest lead first."""
    every = duels(tables, provider)
    won = sorted((x for x in every if x.ratio > 1), key=lambda x: -x.ratio)
    head = f"`{provider}` is faster than every peer in {len(won)} of {len(every)} cases"
    lines = [f"{x.case}: {x.peer} takes {text.ratio(x.ratio)} times as long" for x in won]
    return _listing(head, lines)


def behind(tables: Sequence[Table], provider: str) -> str:
    """The cases in which some peer is as fast or faster, widest gap first."""
    every = duels(tables, provider)
    lost = sorted((x for x in every if x.ratio <= 1), key=lambda x: x.ratio)
    head = f"A peer is as fast as `{provider}`, or faster, in {len(lost)} of {len(every)} cases"
    lines = [
        f"{x.case}: `{provider}` takes {text.ratio(1 / x.ratio)} times as long as {x.peer}"
        for x in lost
    ]
    return _listing(head, lines)


def _listing(head: str, lines: list[str]) -> str:
    if not lines:
        return f"{head}."
    more = len(lines) - _SHOWN
    shown = [f"* {line}" for line in lines[:_SHOWN]]
    return "\n".join([f"{head}:", "", *shown, *([f"* and {more} more"] if more > 0 else [])])
