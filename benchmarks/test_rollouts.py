"""Generation, weight updates and the rest of a step, by engine, in the suite."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.conftest import DEVICE, suite
from benchmarks.replay import replay
from benchmarks.results import Collector
from benchmarks.rollouts import ENGINES, measure_rollouts, pairs
from benchmarks.rollouts.sizes import sizes

_STEPS = 3
_BY_NAME = {engine.name: engine for engine in ENGINES}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = suite(metafunc.config) != "quick"
    found = [(engine.name, size) for engine, size in pairs(DEVICE, full)]
    metafunc.parametrize(("name", "size"), found, ids=["-".join(pair) for pair in found])


def test_rollouts(
    benchmark: Any,
    name: str,
    size: str,
    device: str,
    collector: Collector | None,
    begin: Callable[..., None],
) -> None:
    engine = _BY_NAME[name]
    if (reason := engine.absent()) is not None:
        warnings.warn(f"{name}: {reason}", stacklevel=1)
        pytest.skip(reason)
    begin()
    entry = measure_rollouts(engine, size, device, _STEPS)
    if collector is not None:
        collector.add("rollouts", entry)
    assert entry.failure is None
    benchmark.group = f"a step by engine, {sizes(device)[size]}"
    benchmark.extra_info["phases"] = entry.phases
    replay(benchmark, entry.seconds)
