"""Errors on a policy's distributions, in the suite."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.accuracy import measure_accuracy
from benchmarks.record import Collector
from benchmarks.replay import replay
from benchmarks.suites import Entry


def test_accuracy(
    benchmark: Any,
    accuracy_entry: Entry,
    device: str,
    collector: Collector | None,
    deadline: float,
) -> None:
    if time.monotonic() > deadline:
        pytest.skip("not reached: the time was up")
    if (reason := accuracy_entry.too_large(device)) is not None:
        pytest.skip(reason)
    start = time.perf_counter()
    found = measure_accuracy(
        accuracy_entry.case, device, slow=accuracy_entry.slow, deadline=deadline
    )
    benchmark.group = "measuring errors on a policy's distributions"
    replay(benchmark, [time.perf_counter() - start])
    if collector is not None:
        collector.add_accuracy(found)
    # a failure of ours is a defect, another library's is a result
    ours = (row for row in found["rows"] if row["provider"].startswith("ours"))
    assert {row["provider"]: row["failure"] for row in ours if row["failure"]} == {}
