"""Generation, weight updates and the rest of a step, by engine, in the suite."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest

from benchmarks.record import Collector
from benchmarks.replay import replay
from benchmarks.rollouts import ENGINES, measure_rollouts, pairs
from benchmarks.rollouts.sizes import sizes

_STEPS = 3
_BY_NAME = {engine.name: engine for engine in ENGINES}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    from benchmarks.conftest import DEVICE, suite

    full = suite(metafunc.config) != "quick"
    found = [(engine.name, size) for engine, size in pairs(DEVICE, full)]
    metafunc.parametrize(("name", "size"), found, ids=["-".join(pair) for pair in found])


def test_rollouts(
    benchmark: Any, name: str, size: str, device: str, collector: Collector | None, deadline: float
) -> None:
    engine = _BY_NAME[name]
    if (reason := engine.absent()) is not None:
        warnings.warn(f"{name}: {reason}", stacklevel=1)
        pytest.skip(reason)
    if time.monotonic() > deadline:
        pytest.skip("not reached: the time was up")
    entry = measure_rollouts(engine, size, device, _STEPS)
    if collector is not None:
        collector.add_rollouts(entry)
    assert entry["failure"] is None
    benchmark.group = f"a step by engine, {sizes(device)[size]}"
    benchmark.extra_info["phases"] = entry["phases"]
    replay(benchmark, entry["seconds"])
