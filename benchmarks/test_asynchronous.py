"""Runs with 0, 1 and 2 batches sampled ahead, on a task with heavy-tailed times of its tools.

A case is a seed: all runs have its weights, prompts and settings, one after the other. What a tool
and a training step take is simulated; weights, tokens and log-probabilities are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks import text
from benchmarks.asynchronous import CORRECTION, MAX_STALENESS, PROMPTS, SIZE, TRAINING, WAYS, run
from benchmarks.child import ask
from benchmarks.conftest import Session
from benchmarks.measure import attempt
from benchmarks.results import Row
from benchmarks.simulated import LONGEST, SHORTEST, TAIL
from benchmarks.test_states import LAST

_STEPS, _SEEDS = 60, (0, 1, 2)


@dataclass(frozen=True)
class Seed:
    """So many steps of every way."""

    steps: int
    seed: int

    def facts(self) -> dict[str, Any]:
        """Return the facts as a result file holds them."""
        facts = {"model": "tiny", "tokens": 0, "dtype": "fp32", "steps": self.steps}
        return facts | {"seed": self.seed}

    def __str__(self) -> str:
        return f"{self.steps} steps, seed {self.seed}"


CASES = {
    "tiny": [Seed(2, 0)],
    "cpu": [Seed(_STEPS, seed) for seed in _SEEDS],
}


def names(case: Seed) -> list[str]:
    return list(WAYS)


def about(case: Seed, device: str) -> str:
    return (
        f"{case.steps} steps of {PROMPTS} prompts and {PROMPTS * SIZE} completions of the demo's "
        f"task, {CORRECTION}, max_staleness {MAX_STALENESS} with weights in flight; simulated: a "
        f"tool before each token, whose time has a Pareto distribution (index {TAIL:g}, "
        f"{text.duration(SHORTEST)} to {text.duration(LONGEST)}), and {text.duration(TRAINING)} "
        "more in each training step"
    )


def measure(case: Seed, names: Sequence[str], session: Session) -> list[Row]:
    rows = [Row(name, WAYS[name].note, info={"work": f"seed {case.seed}"}) for name in names]
    first = case.seed % len(names)  # another way is first with each seed
    order = [*names[first:], *names[:first]]
    with attempt(*rows):
        outcomes = ask(_run_all, case, order)
        for row in rows:
            _fill(row, outcomes[row.provider])
    return rows


def _run_all(case: Seed, order: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {name: run(WAYS[name], case.steps, case.seed) for name in order}


def _fill(row: Row, outcome: dict[str, Any]) -> None:
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


def test_asynchronous(row: Row) -> None:
    """Train the demo's policy."""
    assert row.info["rewards"]
