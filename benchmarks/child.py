"""A measurement in a process of its own: ``python -m benchmarks.child WHAT CASE... PROVIDER``.

For the resident memory of a CPU process, and for providers that may hang and must be killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.memory import Memory, measure_memory
from benchmarks.problem import make_problem
from benchmarks.providers.base import Provider
from benchmarks.shapes import MODELS, Case
from benchmarks.work import WORKS

ROOT = Path(__file__).parent.parent
_LONGEST = 900.0  # seconds; for those who are not expected to hang


def memory_alone(case: Case, provider: Provider) -> Memory | None:
    """Peak memory of one call on the CPU; None where the process failed."""
    answer = _ask("memory", case, provider.name, 0, _LONGEST)
    if "failure" in answer:
        warnings.warn(f"no memory of {provider.name}, {case}: {answer['failure']}", stacklevel=2)
        return None
    return Memory(**answer)


def measured_alone(case: Case, provider: Provider, rounds: int, left: float) -> dict[str, Any]:
    """The fields of a row, measured on the GPU; a ``failure`` where the process failed.

    ``left``: seconds until the deadline of all.
    """
    answer = _before_timeout("row", case, provider, rounds, left)
    if answer.get("memory"):
        answer["memory"] = Memory(**answer["memory"])
    return answer


def accuracy_alone(case: Case, provider: Provider, left: float) -> dict[str, Any]:
    """The same of an accuracy table's row."""
    return _before_timeout("accuracy", case, provider, 0, left)


def _before_timeout(
    what: str, case: Case, provider: Provider, rounds: int, left: float
) -> dict[str, Any]:
    assert provider.timeout is not None
    if left < provider.timeout:
        return {"absent": "not reached: too little time was left for it"}
    return _ask(what, case, provider.name, rounds, provider.timeout)


def _ask(what: str, case: Case, name: str, rounds: int, timeout: float) -> dict[str, Any]:
    names = [case.model.name, str(case.tokens), case.dtype, case.work.name, name, str(rounds)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    try:
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.child", what, *names],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"did not finish in {timeout:.0f} s"}
    if run.returncode != 0:
        last = run.stderr.strip().splitlines()[-1:] or [f"exit code {run.returncode}"]
        return {"failure": last[0][:200]}
    return json.loads(run.stdout.splitlines()[-1])


def _answer(what: str, case: Case, name: str, rounds: int) -> dict[str, Any]:
    from benchmarks import accuracy, measure  # they ask for processes themselves
    from benchmarks.providers import PROVIDERS

    provider = PROVIDERS[name]
    if what == "row":
        return asdict(measure.measure_one(case, provider, "cuda", rounds))
    if what == "accuracy":
        return asdict(accuracy.measure_one(case, provider, "cuda"))
    tiny = replace(case, model=MODELS["tiny"], tokens=32)
    provider.run(make_problem(tiny))  # libraries are loaded, threads started
    memory, _ = measure_memory(provider.run, make_problem(case, exact=False))
    return asdict(memory)


def _main(
    what: str, model: str, tokens: str, dtype: str, work: str, name: str, rounds: str
) -> None:
    case = Case(MODELS[model], int(tokens), dtype, WORKS[work])
    print(json.dumps(_answer(what, case, name, int(rounds))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
