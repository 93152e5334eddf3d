"""Cost and error of each backward of our ops, next to the other libraries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import text
from benchmarks.check import against
from benchmarks.conftest import Session, check_row
from benchmarks.measure import error_cells
from benchmarks.measure import measure as measured
from benchmarks.problem import make_problem
from benchmarks.providers import EVERY
from benchmarks.providers.ours import BACKWARDS
from benchmarks.results import Row
from benchmarks.shapes import DTYPES, WORKS, Case, make_case
from benchmarks.test_accuracy import distribution


def _every_input(model: str, tokens: int, *dtypes: str, slow: bool = True) -> list[Case]:
    """Return entries with the inputs that matter most first."""
    return [
        make_case("logprobs-grad", model, tokens, dtype, inputs, slow=slow, memory=slow and first)
        for inputs in ("policy-like", "text-like", "peaked")
        for dtype in dtypes
        for first in [inputs == "policy-like"]
    ]


CASES = {
    "tiny": _every_input("tiny", 32, *DTYPES, slow=False),
    "quick": _every_input("small", 128, *DTYPES, slow=False),
    "cpu": _every_input("qwen2.5-0.5b", 1024, *DTYPES),
    "gpu": _every_input("qwen3-1.7b", 8192, "bf16"),
    "gpu-full": [
        *_every_input("qwen3-1.7b", 8192, "bf16"),
        *_every_input("qwen3-8b", 8192, "bf16"),
    ],
}
_WRONG = 0.5  # share of a gradient's norm; rounding logits to 16 bits changes it by less
_BARE = ("logprobs bare-gemms",)  # the bare work of "logprobs" is one GEMM
_OURS = [f"logprobs-grad {provider.name}" for provider in BACKWARDS]
_USUAL = ("ours-sparse-hidden", "ours-sparse")
_WAYS = (
    *_OURS,
    *(f"logprobs-grad {name}" for name in ("eager", "compile", "trl")),
    *(f"logprobs-grad-frozen {name}" for name in ("ours-again", "ours-kept", _USUAL[0], "eager")),
    *(f"dapo {name}" for name in ("ours", *_USUAL, "eager", "trl", "liger")),
    *(f"dapo-frozen {name}" for name in ("ours", _USUAL[0])),
)


def notes(case: Case) -> dict[str, str]:
    """Return works with their providers: an exact backward takes the same time on all inputs."""
    others = (*_OURS, "logprobs-grad eager")
    shown = [*_BARE, *(_WAYS if case.inputs == "policy-like" else others)]
    return {name: EVERY[name.split()[1]].note for name in shown}


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    for row in rows:
        row.info["work"], row.provider = row.provider.split()
    calls = [
        (EVERY[row.provider], replace(case, work=WORKS[row.info["work"]]), row) for row in rows
    ]
    measured(calls, session.settings(case, bits=False, allowed=_WRONG))
    for row in rows:
        row.cells = error_cells(row)
        if "entries" in row.info:
            mean, most = row.info["entries"] or (math.nan, math.nan)
            row.cells["entries: mean (max)"] = f"{mean:.1f} ({most:.0f})"
            row.cells["exact, %"] = text.digits(100 * row.info["exact_share"], 2)


def about(case: Case, device: str) -> str:
    described = distribution(make_problem(case, device))
    return f"{against(case, device)}; {described}"


test_backwards = check_row
