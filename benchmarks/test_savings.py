"""Skipped rows and an adapter on the head: what they save, in the suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.replay import replay
from benchmarks.results import Collector, SavingsTable
from benchmarks.savings import VARIANTS, measure_savings
from benchmarks.suites import Entry

_ROUNDS = 5


@pytest.fixture(scope="session")
def savings(
    savings_entry: Entry,
    device: str,
    collector: Collector | None,
    deadline: float,
    begin: Callable[..., None],
) -> SavingsTable:
    begin(savings_entry)
    table = measure_savings(savings_entry.case, device, _ROUNDS, deadline)
    if collector is not None:
        collector.add("savings", table)
    return table


@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS])
def test_savings(benchmark: Any, savings: SavingsTable, name: str) -> None:
    (row,) = [row for row in savings.rows if row.provider == name]
    assert row.failure is None
    benchmark.group = f"savings, {savings.model}, T={savings.tokens}, {savings.dtype}"
    benchmark.extra_info["errors"] = row.errors
    replay(benchmark, row.seconds)
