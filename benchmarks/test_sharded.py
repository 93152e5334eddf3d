"""A head over several ranks: ``python -m pytest benchmarks/test_sharded.py --benchmark-only``."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.conftest import Session
from benchmarks.replay import replay
from benchmarks.results import ShardedTable
from benchmarks.shapes import MODELS, Case
from benchmarks.sharded.arms import ARMS
from benchmarks.sharded.measure import measure_sharded
from benchmarks.work import WORKS

_ROUNDS, _RANKS = 3, 2


# of many tokens the logits would take more memory than the gathered head
@pytest.fixture(scope="session", params=[("fp32", 1024), ("bf16", 1024), ("bf16", 4096)], ids=str)
def table(request: pytest.FixtureRequest, session: Session) -> ShardedTable:
    if session.device != "cpu":
        pytest.skip("the ranks are processes of a CPU")
    session.begin()
    dtype, tokens = request.param
    model, tokens = ("small", 128) if session.quick else ("qwen2.5-0.5b", tokens)
    case = Case(MODELS[model], tokens, dtype, WORKS["dapo"])
    found = measure_sharded(case, _RANKS, _ROUNDS, memory=not session.quick)
    session.keep("sharded", found)
    return found


@pytest.mark.parametrize("name", ARMS)
def test_sharded(benchmark: Any, session: Session, table: ShardedTable, name: str) -> None:
    """Time a step over several ranks."""
    (row,) = [row for row in table.rows if row.provider == name]
    session.judge(row)
    benchmark.group = f"{table.ranks} ranks, {table.model}, T={table.tokens}, {table.dtype}"
    benchmark.extra_info["errors"] = row.errors
    replay(benchmark, row.seconds)
