"""A whole training step, ours beside TRL's, in the suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.conftest import suite
from benchmarks.replay import replay
from benchmarks.results import Collector, TrainingTable
from benchmarks.training import PROVIDERS, choose, measure_training

_ROUNDS = 5


@pytest.fixture(scope="session")
def training(
    pytestconfig: pytest.Config,
    device: str,
    collector: Collector | None,
    deadline: float,
    begin: Callable[..., None],
) -> TrainingTable:
    begin()
    config = choose(device, full=suite(pytestconfig) != "quick")
    table = measure_training(config, device, _ROUNDS, deadline=deadline)
    if collector is not None:
        collector.add("training", table)
    return table


@pytest.mark.parametrize("name", [provider.name for provider in PROVIDERS])
def test_training_step(benchmark: Any, training: TrainingTable, name: str) -> None:
    (row,) = [row for row in training.rows if row.provider == name]
    if row.absent is not None:
        pytest.skip(row.absent)
    if row.failure is not None:
        # a failure of ours is a defect, another library's is a result
        (pytest.fail if name.startswith("ours") else pytest.xfail)(row.failure)
    benchmark.group = f"training step, {training.model}, {training.dtype}"
    benchmark.extra_info["errors"] = row.errors
    replay(benchmark, row.seconds)
