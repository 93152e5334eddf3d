"""Runs with 0, 1, and 2 batches sampled ahead, on a task whose tools have heavy-tailed times.

A case is a seed: all runs have its weights, prompts, and settings, one after another. The times of
tools and of a training step are simulated; weights, tokens, and log-probabilities are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks import text
from benchmarks.asynchronous import CORRECTION, MAX_STALENESS, PROMPTS, SIZE, TRAINING, WAYS, run
from benchmarks.child import ask
from benchmarks.conftest import Session, check_row
from benchmarks.measure import attempt
from benchmarks.results import Row
from benchmarks.shapes import Shape
from benchmarks.simulated import LONGEST, SHORTEST, TAIL
from benchmarks.test_states import LAST

_STEPS, _SEEDS = 60, (0, 1, 2)
NOTES = {name: way.note for name, way in WAYS.items()}


def _seed(steps: int, seed: int) -> Shape:
    facts = {"model": "tiny", "tokens": 0, "dtype": "fp32", "steps": steps, "seed": seed}
    return Shape(f"{steps} steps, seed {seed}", facts)


CASES = {
    "tiny": [_seed(2, 0)],
    "cpu": [_seed(_STEPS, seed) for seed in _SEEDS],
}


def about(case: Shape, device: str) -> str:
    return (
        f"{case['steps']} steps of {PROMPTS} prompts and {PROMPTS * SIZE} completions of the "
        f"demo's task, {CORRECTION}, max_staleness {MAX_STALENESS} with weights in flight; "
        "simulated: a tool call before each token, with a Pareto distribution of times (index "
        f"{TAIL:g}, {text.duration(SHORTEST)} to {text.duration(LONGEST)}), and "
        f"{text.duration(TRAINING)} more in each training step"
    )


def measure(case: Shape, rows: Sequence[Row], session: Session) -> None:
    names = [row.provider for row in rows]
    first = case["seed"] % len(names)  # each seed starts with another way
    order = [*names[first:], *names[:first]]
    with attempt(*rows):
        outcomes = ask(_run_all, case, order)
        for row in rows:
            _fill(row, outcomes[row.provider], case["seed"])


def _run_all(case: Shape, order: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {name: run(WAYS[name], case["steps"], case["seed"]) for name in order}


def _fill(row: Row, outcome: dict[str, Any], seed: int) -> None:
    row.info["work"] = f"seed {seed}"
    row.seconds, wrong = outcome.pop("seconds"), outcome.pop("wrong")
    row.info |= outcome
    row.leave_out("wrong", wrong)
    if row.runs:
        row.cells = {
            "mean time": text.duration(fmean(row.seconds)),
            "staleness": f"{outcome['staleness']:.2f}",
            "at most": str(outcome["oldest"]),
            "left out": text.percent(outcome["left_out"]),
            "mean reward": f"{fmean(outcome['rewards']):.3f}",
            "at the end": f"{fmean(outcome['rewards'][-LAST:]):.3f}",
        }


test_asynchronous = check_row
