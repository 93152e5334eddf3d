"""Steps of other trainers: ``python -m pytest benchmarks/test_hosts.py --benchmark-only``."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.conftest import Session
from benchmarks.hosts import WORKS
from benchmarks.hosts.measure import measure_host
from benchmarks.hosts.work import ARMS
from benchmarks.replay import replay
from benchmarks.results import HostTable

_ROUNDS = 3


@pytest.fixture(scope="session", params=WORKS)
def table(request: pytest.FixtureRequest, session: Session) -> HostTable:
    if session.device != "cpu":
        pytest.skip("the trainers are put on a CPU")
    session.begin()
    found = measure_host(WORKS[request.param], _ROUNDS, full=not session.quick)
    session.keep("hosts", found)
    return found


@pytest.mark.parametrize("name", ARMS)
def test_hosts(benchmark: Any, session: Session, table: HostTable, name: str) -> None:
    """Time a step of a host's trainer."""
    row = next((row for row in table.rows if row.provider == name), None)
    if row is None:
        pytest.skip("not for this trainer")
    session.judge(row)
    benchmark.group = f"{table.host}, {table.step}, {table.model}"
    benchmark.extra_info["errors"] = row.errors
    replay(benchmark, row.seconds)
