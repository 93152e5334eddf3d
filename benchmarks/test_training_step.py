"""A whole training step, ours beside TRL's, in the suite."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.record import Collector
from benchmarks.replay import replay
from benchmarks.training import PROVIDERS, choose, measure_training

_ROUNDS = 5


@pytest.fixture(scope="session")
def training_entry(
    pytestconfig: pytest.Config, device: str, collector: Collector | None, deadline: float
) -> dict[str, Any]:
    if time.monotonic() > deadline:
        pytest.skip("not reached: the time was up")
    option = pytestconfig.getoption
    quick = option("--suite") in (None, "quick") and not option("--full")
    entry = measure_training(choose(device, full=not quick), device, _ROUNDS, deadline=deadline)
    if collector is not None:
        collector.add_training(entry)
    return entry


@pytest.mark.parametrize("name", [provider.name for provider in PROVIDERS])
def test_training_step(benchmark: Any, training_entry: dict[str, Any], name: str) -> None:
    (row,) = [row for row in training_entry["rows"] if row["provider"] == name]
    if row["absent"] is not None:
        pytest.skip(row["absent"])
    if row["failure"] is not None:
        # a failure of ours is a defect, another library's is a result
        (pytest.fail if name.startswith("ours") else pytest.xfail)(row["failure"])
    benchmark.group = f"training step, {training_entry['model']}, {training_entry['dtype']}"
    benchmark.extra_info["errors"] = row["errors"]
    replay(benchmark, row["seconds"])
