"""Whole runs of a pretrained model with exact and sparse backwards of the head, by optimizer.

A case is one way with one seed, so that a call may measure some of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks import text
from benchmarks.child import ask
from benchmarks.conftest import Session
from benchmarks.measure import attempt
from benchmarks.real import RealCase, Setup, lacking, run
from benchmarks.results import Row

_LONGEST = 7200.0  # seconds of a run
_STEPS, _SEEDS = 15, (0, 1, 2)
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optim": "sgd", "learning_rate": 0.1},
    "muon": {},
}
_BACKWARDS: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": ("exact gradients", {}),
    "sparse-hidden": ("sparse gradient of the hidden states", {"backward": "sparse"}),
    "sparse": (
        "sparse gradients of hidden states and head",
        {"backward": "sparse", "backward_exact_weight": False},
    ),
}
WAYS = {
    f"{optimizer}{'-frozen' * frozen}-{backward}": Setup(
        note=note + ", head frozen" * frozen,
        package="grpo_trainer",
        frozen_head=frozen,
        muon=optimizer == "muon",
        changes=settings | changes,
    )
    for frozen in (False, True)
    for optimizer, settings in _OPTIMIZERS.items()
    for backward, (note, changes) in _BACKWARDS.items()
    if not (frozen and backward == "sparse")  # there is no gradient of the head
}
CASES = {
    "tiny": [
        RealCase(2, 0, name, tiny=True)
        for name in ("adamw-sparse", "sgd-exact", "muon-frozen-exact")
    ],
    "cpu": [RealCase(_STEPS, seed, name) for seed in _SEEDS for name in WAYS],
}


def names(case: RealCase) -> list[str]:
    return [case.setup]


def about(case: RealCase, device: str) -> str:
    return f"{case.steps} steps of 32 completions"


def measure(case: RealCase, names: Sequence[str], session: Session) -> list[Row]:
    way = WAYS[case.setup]
    row = Row(case.setup, way.note, info={"work": f"seed {case.seed}"})
    row.leave_out("absent", lacking(way, case))
    if row.runs:
        with attempt(row):
            _fill(row, case, ask(run, way, case, session.device, timeout=_LONGEST))
    return [row]


def _fill(row: Row, case: RealCase, found: dict[str, Any]) -> None:
    lists = ("rewards", "gradient_norms", "entropies", "held_out")
    row.info |= {name: found[name] for name in (*lists, "frequent_rows", "rare_rows")}
    missing = len(found["entropies"]) != case.steps or len(found["held_out"]) < 2
    finite = all(math.isfinite(value) for name in lists for value in found[name])
    row.leave_out("wrong", None if finite and not missing else "a step is missing or not finite")
    if row.runs:
        before, *_, after = found["held_out"]
        last = found["entropies"][-5:]
        row.cells = {
            "held-out reward before": f"{before:.3f}",
            "after": f"{after:.3f}",
            "entropy, last 5 steps": f"{fmean(last):.3f}",
            "change of frequent rows": text.error(found["frequent_rows"]),
            "of rare ones": text.error(found["rare_rows"]),
        }


def test_optimizers(row: Row) -> None:
    """Train a pretrained model."""
    assert row.info["rewards"]
