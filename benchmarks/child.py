"""Measurements in a process of their own, by ``benchmarks.alone``.

For the resident memory of a CPU process, and for providers that may hang and must be killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.providers.base import Provider
from benchmarks.results import Memory
from benchmarks.shapes import Case

_LONGEST = 900.0  # seconds; for those who are not expected to hang


def memory_alone(case: Case, provider: Provider) -> Memory | None:
    """Measure the peak memory of one call on the CPU; None where the process failed."""
    answer = _ask("memory", case, provider.name, 0, _LONGEST)
    if "failure" in answer:
        warnings.warn(f"no memory of {provider.name}, {case}: {answer['failure']}", stacklevel=2)
        return None
    return Memory(**answer)


def measured_alone(
    case: Case, provider: Provider, rounds: int, left: float, what: str = "row"
) -> dict[str, Any]:
    """Measure the fields of a row on the GPU; a ``failure`` where the process failed.

    ``left``: seconds until the deadline of all. ``what``: "row" of a case, or of "accuracy".
    """
    assert provider.timeout is not None
    if left < provider.timeout:
        return {"absent": "not reached: too little time was left for it"}
    answer = _ask(what, case, provider.name, rounds, provider.timeout)
    if answer.get("memory"):
        answer["memory"] = Memory(**answer["memory"])
    return answer


def _ask(what: str, case: Case, name: str, rounds: int, timeout: float) -> dict[str, Any]:
    words = [case.model.name, str(case.tokens), case.dtype, case.work.name, case.inputs]
    return ask("benchmarks.alone", [what, *words, name, str(rounds)], timeout)


def ask(module: str, words: list[str], timeout: float, **environment: str) -> dict[str, Any]:
    """Return the JSON that ``python -m module`` prints last; a ``failure`` if it fails or hangs."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said, complained = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"failure": f"did not finish in {timeout:.0f} s"}
    finally:
        _end(process)
    if process.returncode != 0:
        print(complained[-5000:], file=sys.stderr)
        last = complained.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        return {"failure": last[0][:200]}
    return json.loads(said.splitlines()[-1])


def _end(process: subprocess.Popen[str]) -> None:
    """End it with what it started, a server maybe."""
    if process.poll() is None:
        import psutil

        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
