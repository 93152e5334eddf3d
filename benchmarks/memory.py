"""Peak memory of one call in a fresh process.

The process, ``python -m benchmarks.memory SHAPE DTYPE WORK PROVIDER``, grows from the inputs alone
to its peak. What the call returns is counted, and reported beside it so that it can be taken off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.problem import Result, make_problem
from benchmarks.providers import PROVIDERS
from benchmarks.shapes import DTYPES, SHAPES, Shape

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Memory:
    """Bytes of resident memory."""

    growth: int  # from before the call to the peak
    returned: int  # gradients or log-probabilities that the caller keeps; a part of ``growth``

    @property
    def extra(self) -> int:
        return self.growth - self.returned


def measure_memory(shape: Shape, dtype: str, work: str, provider: str) -> Memory:
    """Runs this module in its own process."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", shape.name, dtype, work, provider],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Memory(**json.loads(run.stdout.splitlines()[-1]))


def _measure_here(shape: Shape, dtype: str, work: str, name: str) -> Memory:
    provider = PROVIDERS[name]
    call = provider.loss if work == "loss" else provider.logprobs
    assert call is not None
    call(make_problem(SHAPES["tiny"], DTYPES[dtype]))  # libraries are loaded, threads started
    problem = make_problem(shape, DTYPES[dtype], constant_old=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    result = call(problem)
    peak = _status("VmHWM")
    tensors = [result.dhidden, result.dweight] if isinstance(result, Result) else [result]
    return Memory(peak - before, sum(x.nbytes for x in tensors))


def _status(field: str) -> int:
    """Bytes of a field of this process's memory. (``ru_maxrss`` would include the parent's.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    measured = _measure_here(SHAPES[sys.argv[1]], *sys.argv[2:5])
    print(json.dumps(asdict(measured)))
