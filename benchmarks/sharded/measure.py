"""Asks the ranks: times in one launch, in turns, and memory in one launch for each arm."""

from __future__ import annotations

from typing import Any

from benchmarks.check import reference_dtype
from benchmarks.child import ask
from benchmarks.results import ShardedRow, ShardedTable
from benchmarks.shapes import Case
from benchmarks.sharded.arms import ARMS

_LONGEST = 1800.0  # seconds


def measure_sharded(case: Case, ranks: int, rounds: int, memory: bool) -> ShardedTable:
    """Measure every arm on ``ranks`` processes of this machine."""
    words = [case.model.name, str(case.tokens), case.dtype, case.work.name]
    found = _ask(ranks, rounds, words)
    rows = []
    for arm in ARMS.values():
        fields = found if "failure" in found else found[arm.name]
        row = ShardedRow(arm.name, arm.note, **fields)
        if row.runs and memory:
            row.memory = _ask(ranks, 1, [*words, arm.name]).get("memory")
        rows.append(row)
    return ShardedTable(
        work=case.work.name,
        model=case.model.name,
        tokens=case.tokens,
        dtype=case.dtype,
        hidden=case.model.hidden,
        vocabulary=case.model.vocabulary,
        ranks=ranks,
        reference=str(reference_dtype(case, "cpu")).removeprefix("torch."),
        rows=rows,
    )


def _ask(ranks: int, rounds: int, words: list[str]) -> dict[str, Any]:
    return ask("benchmarks.sharded.ranks", [str(ranks), str(rounds), *words], _LONGEST)
