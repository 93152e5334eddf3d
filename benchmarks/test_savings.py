"""What skipped rows and an adapter on the head save, in the suite."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.record import Collector
from benchmarks.replay import replay
from benchmarks.savings import VARIANTS, measure_savings
from benchmarks.suites import Entry

_ROUNDS = 5


@pytest.fixture(scope="session")
def savings(
    savings_entry: Entry, device: str, collector: Collector | None, deadline: float
) -> dict[str, Any]:
    if time.monotonic() > deadline:
        pytest.skip("not reached: the time was up")
    if (reason := savings_entry.too_large(device)) is not None:
        pytest.skip(reason)
    entry = measure_savings(savings_entry.case, device, _ROUNDS, deadline)
    if collector is not None:
        collector.add_savings(entry)
    return entry


@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS])
def test_savings(benchmark: Any, savings: dict[str, Any], name: str) -> None:
    (row,) = [row for row in savings["rows"] if row["provider"] == name]
    assert row["failure"] is None
    benchmark.group = f"savings, {savings['model']}, T={savings['tokens']}, {savings['dtype']}"
    benchmark.extra_info["errors"] = row["errors"]
    replay(benchmark, row["seconds"])
