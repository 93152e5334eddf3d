"""Whole runs of a pretrained model with exact and sparse backwards of the head, by optimizer.

A case is one way with one seed, so a call can measure some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks import text
from benchmarks.conftest import Session, check_row
from benchmarks.real import RealCase, Setup, fill, lacking
from benchmarks.results import Row

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


def notes(case: RealCase) -> dict[str, str]:
    return {case.setup: WAYS[case.setup].note}


def about(case: RealCase, device: str) -> str:
    return f"{case.steps} steps of 32 completions"


def measure(case: RealCase, rows: Sequence[Row], session: Session) -> None:
    [row] = rows
    way = WAYS[case.setup]
    row.leave_out("absent", lacking(way, case))
    logged = "rewards", "gradient_norms", "entropies", "held_out"
    found = fill(row, way, case, session.device, *logged)
    if row.runs:
        row.info |= {name: found[name] for name in ("frequent_rows", "rare_rows")}
        before, *_, after = found["held_out"]
        row.cells = {
            "held-out reward before": f"{before:.3f}",
            "after": f"{after:.3f}",
            "entropy, last 5 steps": f"{fmean(found['entropies'][-5:]):.3f}",
            "change of frequent rows": text.error(found["frequent_rows"]),
            "of rare ones": text.error(found["rare_rows"]),
        }


test_optimizers = check_row
