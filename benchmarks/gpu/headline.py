"""``python -m benchmarks.gpu.headline FILE``: a result file in one screen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import text
from benchmarks.derive import FLOOR, QUOTED, Figures, case, figures, is_peer
from benchmarks.load import Table, load_run

_CASES = 14
_PEERS = 3  # the fastest


def main(path: Path) -> None:
    run = load_run(path)
    print("medians: floor, ours over it, the fastest peers over ours")
    for table in run.tables[:_CASES]:
        print(line(table))
    if len(run.tables) > _CASES:
        print(f"and {len(run.tables) - _CASES} more cases in the report")


def line(table: Table) -> str:
    """One case."""
    rows = figures(table)
    parts = [str(case(table))]
    if FLOOR in rows and (floor := rows[FLOOR].times):
        parts.append(f"floor {text.duration(floor.median)}")
    parts += _ours(rows)
    peers = [x for name, x in rows.items() if is_peer(name) and x.times]
    ratios = [f"{x.row.provider} {_over(x, QUOTED[0])}" for x in peers[:_PEERS]]
    parts.append(", ".join(ratios) or "no peer ran")
    failed = [name for name, x in rows.items() if x.row.failure]
    if failed:
        parts.append(f"FAILED: {', '.join(failed)}")
    return " | ".join(parts)


def _ours(rows: dict[str, Figures]) -> Iterator[str]:
    for name in QUOTED:
        if name in rows and rows[name].times:
            yield f"{name} {_over(rows[name], FLOOR)}"


def _over(x: Figures, base: str) -> str:
    """How many times as long as ``base``."""
    return f"{text.ratio(x.times.to.get(base)) if x.times else ''}x"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
