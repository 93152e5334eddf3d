"""One case for a terminal: everybody's time, memory and errors in every dtype."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from benchmarks import text
from benchmarks.figures import BARE, QUOTED, Figures, figures
from benchmarks.results import Table
from benchmarks.tables.columns import by_reason
from benchmarks.tables.heads import caption

_WIDTH = 100
_TITLES = ("time", "x bare", "MiB", "loss", "grad")
_LEGEND = (
    "time: median of the rounds. x bare: over that of the bare GEMMs, which everybody needs. "
    "MiB: peak memory beyond inputs and outputs. loss, grad: errors against {reference}, of the "
    "loss absolute, of the gradients the norm of the difference over the norm."
)


def summary(tables: Sequence[Table]) -> str:
    """Show one case in each dtype that was measured, and below who is missing or wrong, and why."""
    by_dtype = {table.dtype: figures(table) for table in tables}
    first = (BARE, *QUOTED)
    names = dict.fromkeys(name for rows in by_dtype.values() for name in rows)
    order = sorted(names, key=lambda x: first.index(x) if x in first else len(first))
    header = [f"{dtype}:{t}" if t == "time" else t for dtype in by_dtype for t in _TITLES]
    lines = ([x, *(c for rows in by_dtype.values() for c in _cells(rows.get(x)))] for x in order)
    legend = _LEGEND.format(reference=tables[0].reference)
    above, below = (
        [textwrap.fill(part, _WIDTH) for part in parts]
        for parts in ([caption(tables[0])], [legend, *_missing(tables)])
    )
    return "\n\n".join([*above, text.aligned([["", *header], *lines]), "\n".join(below)])


def _cells(x: Figures | None) -> list[str]:
    if x is None:
        return [""] * len(_TITLES)
    return [
        "wrong" if x.row.failure else text.duration(x.median),
        text.ratio(x.to(BARE)),
        text.mib(x.extra),
        text.error(x.value_error),
        text.error(x.gradient_error),
    ]


def _missing(tables: Sequence[Table]) -> Iterator[str]:
    rows = {f"{x.provider} in {table.dtype}": x for table in tables for x in table.rows}
    reasons = {
        "Not here": {x.provider: x.absent for x in rows.values()},
        "Not able": {name: x.unable for name, x in rows.items() if x.absent is None},
        "Wrong": {name: x.failure for name, x in rows.items()},
    }
    for title, found in reasons.items():
        if listed := by_reason(found.items()):
            yield f"{title}: {listed}."
