"""Data parallelism changes nothing: same rollouts, same parameters, same metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("two_processes.py")


def run(file: Path, launcher: list[str]) -> tuple[torch.Tensor, dict[str, float]]:
    command = [sys.executable, *launcher, str(SCRIPT), str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(f"{file}.pt"), json.loads(Path(f"{file}.json").read_text())


def test_two_processes_equal_one(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    alone, metrics = run(tmp_path / "one", [])
    together, joint = run(tmp_path / "two", launcher)
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-6)
    assert joint == {name: pytest.approx(value, rel=1e-4) for name, value in metrics.items()}
