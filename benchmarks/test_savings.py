"""Savings from skipped rows and an adapter on the head, relative to a full step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.check import against as about  # noqa: F401 (of a case)
from benchmarks.conftest import Session, check_row
from benchmarks.measure import measure as measured
from benchmarks.providers import EVERY
from benchmarks.providers.ours import VARIANTS
from benchmarks.results import Row
from benchmarks.shapes import DTYPES, WORKS, Case, make_case

CASES = {
    "tiny": [make_case("dapo", "tiny", 64, dtype) for dtype in DTYPES],
    "quick": [make_case("dapo", "small", 128, dtype) for dtype in DTYPES],
    "cpu": [make_case("dapo", "qwen2.5-0.5b", 1024, dtype) for dtype in DTYPES],
    "gpu": [make_case("dapo", "qwen3-1.7b", 8192, "bf16")],
    "gpu-full": [make_case("dapo", model, 8192, "bf16") for model in ("qwen3-1.7b", "qwen3-8b")],
}


NOTES = {provider.name: provider.note for provider in VARIANTS}
_WORKS = {provider.name: WORKS[work] for provider, work in VARIANTS.items()}


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    calls = [(EVERY[row.provider], replace(case, work=_WORKS[row.provider]), row) for row in rows]
    measured(calls, session.settings(case, bits=False))


test_savings = check_row
