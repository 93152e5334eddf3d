"""Whole runs of a pretrained model by our trainer and by TRL's: same rows, seeds and settings.

A case is one trainer with one seed, so that a call may measure some of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.child import ask
from benchmarks.conftest import Session
from benchmarks.measure import attempt
from benchmarks.real import SETUPS, RealCase, lacking, run
from benchmarks.results import Row
from benchmarks.test_real import fill_times

_LONGEST = 7200.0  # seconds of a run
_STEPS, _SEEDS = 15, (0, 1, 2)
_WHOLE = ("ours", "trl", "trl-our-head")
_ONCE = ("ours-lora", "trl-lora", "ours-vllm", "ours-vllm-uncorrected")
_CPU = [RealCase(_STEPS, seed, name) for seed in _SEEDS for name in _WHOLE]
CASES = {
    "tiny": [RealCase(2, 0, name, tiny=True) for name in (*_WHOLE, "ours-lora", "trl-lora")],
    "cpu": [*_CPU, *(RealCase(_STEPS, 0, name) for name in _ONCE)],
    "gpu": [RealCase(100, 0, name) for name in ("ours", "trl")],
}


def names(case: RealCase) -> list[str]:
    return [case.setup]


def about(case: RealCase, device: str) -> str:
    return f"{case.steps} steps of 32 completions, AdamW"


def measure(case: RealCase, names: Sequence[str], session: Session) -> list[Row]:
    setup = SETUPS[case.setup]
    row = Row(case.setup, setup.note, info={"work": f"seed {case.seed}"})
    # a job for a GPU that measured nothing is not done
    row.leave_out("wrong" if session.suite == "gpu" else "absent", lacking(setup, case))
    if row.runs:
        with attempt(row):
            found = ask(run, setup, case, session.device, timeout=_LONGEST)
            _fill(row, case, found)
            if session.device == "cuda":  # where nothing else runs
                fill_times(row, [found])
    return [row]


def _fill(row: Row, case: RealCase, found: dict[str, Any]) -> None:
    names = ("rewards", "losses", "gradient_norms", "held_out")
    row.info |= {name: found[name] for name in names}
    missing = len(found["rewards"]) != case.steps or len(found["held_out"]) < 2
    finite = all(math.isfinite(value) for name in names for value in found[name])
    row.leave_out("wrong", None if finite and not missing else "a step is missing or not finite")
    if row.runs:
        before, *_, after = found["held_out"]
        row.cells = {"held-out reward before": f"{before:.3f}", "after": f"{after:.3f}"}


def test_curves(row: Row) -> None:
    """Train a pretrained model."""
    assert row.info["rewards"]
