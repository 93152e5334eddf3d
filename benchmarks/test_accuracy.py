"""Errors on a policy's distributions, in the suite."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.accuracy import measure_accuracy
from benchmarks.replay import replay
from benchmarks.results import Collector
from benchmarks.suites import Entry


def test_accuracy(
    benchmark: Any,
    accuracy_entry: Entry,
    device: str,
    collector: Collector | None,
    deadline: float,
    begin: Callable[..., None],
) -> None:
    begin(accuracy_entry)
    start = time.perf_counter()
    case, slow = accuracy_entry.case, accuracy_entry.slow
    found = measure_accuracy(case, device, slow=slow, deadline=deadline)
    benchmark.group = "measuring errors on a policy's distributions"
    replay(benchmark, [time.perf_counter() - start])
    if collector is not None:
        collector.add("accuracy", found)
    # a failure of ours is a defect, another library's is a result
    ours = (row for row in found.rows if row.provider.startswith("ours"))
    assert {row.provider: row.failure for row in ours if row.failure} == {}
