"""Seconds per phase: inner phases are not counted twice, and a step is the sum of its phases."""

from __future__ import annotations

import pytest
import torch

from grpo_trainer.monitor import phase
from grpo_trainer.monitor import phases as module
from grpo_trainer.monitor.phases import Phases


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Fake a clock on which seconds pass at each look."""
    now = [0.0]

    def look() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(module.time, "perf_counter", look)
    return now


def test_exclusive_and_averaged_over_steps(clock):
    phases = Phases(torch.device("cpu"))
    for _ in range(2):
        with phases.running("loss"):  # 1 second until generate, 1 until old, 1 to the end
            with phase("generate"), phase("sync"):  # 1, 1 and 1 again
                pass
            with phase("old"):
                pass
        phases.step()
    values = {name: float(value) for name, value in phases.drain().items()}
    assert values["profiling/generate"] == 2 and values["profiling/sync"] == 1
    assert values["profiling/old"] == 1 and values["profiling/loss"] == 3
    assert values["step_time"] == 7
    assert all(values[f"profiling/{name}"] != values[f"profiling/{name}"] for name in ("ref",))
    again = phases.drain()
    assert all(torch.isnan(again[name]) for name in again)


def test_nothing_outside_of_a_step(clock):
    phases = Phases(torch.device("cpu"))
    with phase("generate"):
        pass
    assert clock == [0.0]
    with pytest.raises(RuntimeError), phases.running("loss"), phase("score"):
        raise RuntimeError
    with phase("generate"):
        pass
    assert clock == [4.0]
