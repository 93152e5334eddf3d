"""Every Triton kernel compiles for every target, without spills and within shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.backends.compile_gate import command, fits

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("target", ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942"))
def test_kernels_compile(target: str) -> None:
    # the interpreter replaces triton.jit at import, so compilation needs a process without it
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(command(target), capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    listed, *results = map(json.loads, run.stdout.splitlines())
    compiled = {result["kernel"] for result in results}
    assert set(listed["kernels"]) <= compiled, "a kernel without a case in gate_cases.py"
    for result in results:
        assert fits(result), result
