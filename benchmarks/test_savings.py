"""What skipped rows and an adapter on the head save, by the step that saves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.check import against
from benchmarks.conftest import Session
from benchmarks.measure import measure as measured
from benchmarks.providers.savings import VARIANTS
from benchmarks.results import Row
from benchmarks.shapes import DTYPES, Entry, entry
from benchmarks.work import WORKS

CASES = {
    "tiny": [entry("dapo", "tiny", 64, dtype) for dtype in DTYPES],
    "quick": [entry("dapo", "small", 128, dtype) for dtype in DTYPES],
    "cpu": [entry("dapo", "qwen2.5-0.5b", 1024, dtype) for dtype in DTYPES],
    "gpu": [entry("dapo", "qwen3-1.7b", 8192, "bf16")],
    "gpu-full": [entry("dapo", model, 8192, "bf16") for model in ("qwen3-1.7b", "qwen3-8b")],
}
_BY_NAME = {provider.name: provider for provider in VARIANTS}


def names(case: Entry) -> list[str]:
    return list(_BY_NAME)


def measure(case: Entry, names: Sequence[str], session: Session) -> list[Row]:
    found = [_BY_NAME[name] for name in names]
    calls = [(each, replace(case.case, work=WORKS[VARIANTS[each]])) for each in found]
    return measured(calls, session.settings(case, bits=False))


def about(case: Entry, device: str) -> str:
    return against(case.case, device)


def test_savings(row: Row) -> None:
    """Time a loss of ours with more or less to do."""
    assert row.seconds
