"""The suite: ``python -m pytest benchmarks --benchmark-only [--full]``."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.replay import replay
from benchmarks.results import Row
from benchmarks.suites import Entry


def test_head(benchmark: Any, entry: Entry, table: dict[str, Row], provider_name: str) -> None:
    row = table.get(provider_name)
    if row is None:
        pytest.skip("starts slowly: not in this case")
    if (reason := row.absent or row.unable) is not None:
        pytest.skip(reason)
    if row.failure is not None:
        # a failure of ours is a defect, another library's is a result
        (pytest.fail if provider_name.startswith("ours") else pytest.xfail)(row.failure)
    benchmark.group = str(entry.case)
    benchmark.extra_info["errors"] = row.errors
    replay(benchmark, row.seconds)
