"""Generation, weight updates and the rest of a step, by engine, in the suite."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from benchmarks.conftest import DEVICE, Session, suite
from benchmarks.replay import replay
from benchmarks.rollouts.engines import Engine
from benchmarks.rollouts.measure import SIZES, measure_rollouts, pairs

_STEPS = 3


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    found = pairs(DEVICE, full=suite(metafunc.config) != "quick")
    names = [f"{engine.name}-{size}" for engine, size in found]
    metafunc.parametrize(("engine", "size"), found, ids=names)


def test_rollouts(benchmark: Any, engine: Engine, size: str, session: Session) -> None:
    if (reason := engine.absent()) is not None:
        warnings.warn(f"{engine.name}: {reason}", stacklevel=1)
        pytest.skip(reason)
    session.begin()
    entry = measure_rollouts(engine, size, session.device, _STEPS)
    session.keep("rollouts", entry)
    assert entry.failure is None
    benchmark.group = f"a step by engine, {SIZES[session.device][size]}"
    benchmark.extra_info["phases"] = entry.phases
    replay(benchmark, entry.seconds)
