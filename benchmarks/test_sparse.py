"""Steps with a sparse backward, next to exact steps and bare GEMMs: time, memory, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks import text
from benchmarks.check import against
from benchmarks.conftest import Session, check_row
from benchmarks.measure import error_cells
from benchmarks.measure import measure as measured
from benchmarks.problem import make_problem
from benchmarks.providers import EVERY
from benchmarks.results import Row
from benchmarks.shapes import REAL, WORKS, Case, make_case
from benchmarks.test_accuracy import distribution

_SPARSE = ("ours-sparse", "ours-sparse-hidden")
_WAYS = {
    "dapo": ("bare-gemms", "bare-gemms-whole", "ours", *_SPARSE, "eager", "liger"),
    "dapo-frozen": ("bare-gemms", "bare-gemms-whole", "ours", _SPARSE[1], "eager"),
}
_ALLOWED = 0.5  # share of a gradient's norm; rounding logits to 16 bits changes it by less
CASES = {
    "tiny": [make_case(work, "tiny", 32, "fp32", "text-like") for work in _WAYS],
    "cpu": [
        make_case(work, model, 1024, dtype, inputs, memory=True)
        for model, inputs in (("smollm2-135m", REAL), ("qwen2.5-0.5b", "text-like"))
        for work in _WAYS
        for dtype in ("fp32", "bf16")
    ],
    "gpu": [
        make_case(work, "qwen3-1.7b", 8192, "bf16", inputs, memory=True)
        for inputs in (REAL, "text-like")
        for work in _WAYS
    ],
    "gpu-full": [
        make_case(work, model, 8192, "bf16", inputs, memory=True)
        for model in ("qwen3-1.7b", "qwen3-8b")
        for inputs in (REAL, "text-like")
        for work in _WAYS
    ],
}


def notes(case: Case) -> dict[str, str]:
    return {name: EVERY[name].note for name in _WAYS[case.work.name]}


def about(case: Case, device: str) -> str:
    return f"{against(case, device)}; {distribution(make_problem(case, device))}"


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    calls = [(EVERY[row.provider], case, row) for row in rows]
    measured(calls, session.settings(case, bits=False, allowed=_ALLOWED))
    of_entries = replace(case, work=WORKS["logprobs-grad"])
    for row in rows:
        row.cells = error_cells(row)
        if row.provider in _SPARSE and row.runs:
            row.info |= EVERY[row.provider].info(make_problem(of_entries, session.device))
            kept = row.info["entries"]
            row.cells["entries: mean (max)"] = f"{kept[0]:.0f} ({kept[1]:.0f})" if kept else ""
            row.cells["exact rows, %"] = text.digits(100 * row.info["exact_share"], 2)


test_sparse = check_row
