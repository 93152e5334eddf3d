"""Steps of a trainer: ``python -m benchmarks.hosts.steps ROUNDS full|quick WORK [ARM]``, as JSON.

With an ARM its memory is measured, in a process that does nothing else; without one all arms are
checked against the host's own, and timed in turns.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.check import why_wrong
from benchmarks.hosts import WORKS
from benchmarks.hosts.work import AT_HEAD, NO_HEAD, OURS, THEIRS, HostWork
from benchmarks.measure import describe, in_turns
from benchmarks.problem import Result
from benchmarks.timing import make_timer, resident_growth
from benchmarks.training.task import QUICK, TrainingConfig, choose

# TRL's own head has to be built last: a model that has it keeps ours from being switched on
_ORDER = (OURS, NO_HEAD, AT_HEAD, THEIRS)


def _times(work: HostWork, config: TrainingConfig, rounds: int) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {arm: {"seconds": [], "errors": {}} for arm in work.arms}
    steps, found = {}, {}
    for arm in (arm for arm in _ORDER if arm in rows):
        try:
            steps[arm] = work.make(arm, config)
            found[arm] = steps[arm].checked()
        except Exception as error:
            rows[arm]["failure"] = describe(error)
    for arm in (OURS, AT_HEAD):
        if arm in found and THEIRS in found:
            errors = _errors(found[arm], found[THEIRS])
            rows[arm] |= {"errors": errors, "failure": why_wrong(errors, "fp32")}
    found.clear()
    timer = make_timer("cpu")
    for arm, step in in_turns(list(steps.items()), rounds):
        rows[arm]["seconds"].append(timer(step))
        step.clear()
    return rows


def _errors(found: Result, expected: Result) -> dict[str, float]:
    pairs = {"loss": (found.loss, expected.loss), "gradient": (found.dweight, expected.dweight)}
    return {name: _relative(*pair) for name, pair in pairs.items()}


def _relative(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _main(rounds: str, size: str, name: str, arm: str | None = None) -> None:
    work, config = WORKS[name], choose("cpu", full=size == "full")
    with contextlib.redirect_stdout(sys.stderr):
        if arm is None:
            said: Any = _times(work, config, int(rounds))
        else:
            work.make(arm, QUICK)()  # libraries are loaded, threads started
            said = {"memory": resident_growth(work.make(arm, config))[1]}
    print(json.dumps(said))


if __name__ == "__main__":
    torch.manual_seed(0)
    _main(*sys.argv[1:])
