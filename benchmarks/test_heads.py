"""The head and its loss: ``python -m pytest benchmarks/ --benchmark-only [--full]``."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.conftest import Session
from benchmarks.replay import replay
from benchmarks.results import Row
from benchmarks.suites import Entry


def test_head(
    benchmark: Any, session: Session, entry: Entry, table: dict[str, Row], provider_name: str
) -> None:
    """Time the head and its loss."""
    row = table.get(provider_name)
    if row is None:
        pytest.skip("starts slowly: not in this case")
    session.judge(row)
    benchmark.group = str(entry.case)
    benchmark.extra_info["errors"] = row.errors
    replay(benchmark, row.seconds)
