"""Every Triton kernel compiles for every target, without spills and within shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

GATE = Path(__file__).with_name("compile_gate.py")


@pytest.mark.parametrize("target", ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942"))
def test_kernels_compile(target: str) -> None:
    # the interpreter replaces triton.jit at import, so compilation needs a process without it
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, str(GATE), target]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    listed, *results = map(json.loads, run.stdout.splitlines())
    compiled = {result["kernel"] for result in results}
    assert set(listed["kernels"]) <= compiled, "a kernel without a case in compile_gate.py"
    for result in results:
        assert result["stack"] == 0 and result["spilled"] == 0, result
        assert result["shared"] <= result["shared_limit"], result
