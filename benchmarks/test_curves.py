"""Whole runs of a pretrained model in our trainer and in TRL: same rows, seeds, and settings.

A case is one trainer with one seed, so a call can measure some of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.conftest import Session, check_row
from benchmarks.real import SETUPS, RealCase, fill, lacking
from benchmarks.results import Row
from benchmarks.test_real import fill_times

_STEPS, _SEEDS = 15, (0, 1, 2)
_WHOLE = ("ours", "trl", "trl-our-head")
_ONCE = ("ours-lora", "trl-lora", "ours-vllm", "ours-vllm-uncorrected")
_CPU = [RealCase(_STEPS, seed, name) for seed in _SEEDS for name in _WHOLE]
CASES = {
    "tiny": [RealCase(2, 0, name, tiny=True) for name in (*_WHOLE, "ours-lora", "trl-lora")],
    "cpu": [*_CPU, *(RealCase(_STEPS, 0, name) for name in _ONCE)],
    "gpu": [RealCase(100, 0, name) for name in ("ours", "trl")],
}


def notes(case: RealCase) -> dict[str, str]:
    return {case.setup: SETUPS[case.setup].note}


def about(case: RealCase, device: str) -> str:
    return f"{case.steps} steps of 32 completions, AdamW"


def measure(case: RealCase, rows: Sequence[Row], session: Session) -> None:
    [row] = rows
    setup = SETUPS[case.setup]
    # a GPU job that measured nothing isn't done
    row.leave_out("wrong" if session.suite == "gpu" else "absent", lacking(setup, case))
    logged = "rewards", "losses", "gradient_norms", "held_out"
    found = fill(row, setup, case, session.device, *logged)
    if row.runs:
        if session.device == "cuda":  # without other load
            fill_times(row, [found])
        before, *_, after = found["held_out"]
        row.cells |= {"held-out reward before": f"{before:.3f}", "after": f"{after:.3f}"}


test_curves = check_row
