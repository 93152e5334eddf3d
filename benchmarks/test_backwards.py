"""The backwards of the ops: ``python -m pytest benchmarks/test_backwards.py --benchmark-only``."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.backwards.measure import measure_backwards
from benchmarks.backwards.providers import BARE, BARE_WORK, WAYS
from benchmarks.conftest import Session
from benchmarks.replay import replay
from benchmarks.results import BackwardsTable
from benchmarks.suites import Entry

_ROUNDS = 3  # the slowest take minutes
_LINES = [(BARE_WORK, BARE.name)] + [(work, x.name) for work, of in WAYS.items() for x in of]


@pytest.fixture(scope="session")
def backwards(backwards_entry: Entry, session: Session) -> BackwardsTable:
    session.begin(backwards_entry)
    table = measure_backwards(
        backwards_entry.case,
        session.device,
        _ROUNDS,
        memory=backwards_entry.memory,
        slow=backwards_entry.slow,
        deadline=session.deadline,
    )
    session.keep("backwards", table)
    return table


@pytest.mark.parametrize("work, name", _LINES, ids=lambda value: value)
def test_backwards(
    benchmark: Any, session: Session, backwards: BackwardsTable, work: str, name: str
) -> None:
    """Time a backward, with the forward before it."""
    found = [row for row in backwards.rows if (row.work, row.provider) == (work, name)]
    if not found:
        pytest.skip("not with these inputs")
    (row,) = found
    session.judge(row)
    of = f"{backwards.model}, T={backwards.tokens}, {backwards.dtype}, {backwards.inputs}"
    benchmark.group = f"backwards, {of}"
    benchmark.extra_info["errors"] = row.errors
    replay(benchmark, row.seconds)
