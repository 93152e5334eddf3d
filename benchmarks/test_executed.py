"""Instructions of GPU kernels per logit, counted in an emulator and in compiled code."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.providers.base import is_ours
from benchmarks.results import ROOT, environment
from tests.support.launch import execute

# of 16-bit logits and gradients, against fp64; others round log-probabilities to 16 bits
_ERROR = {"fp32": 5e-3, "bf16": 1e-2}
_OF_OTHERS = 0.2


def _counted(*arguments: str) -> list[dict[str, Any]]:
    words = "-W", "ignore", "-m", "benchmarks.executed", *arguments
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("TINYGRAD")]))
    said = execute(*words, limit=1800.0, PYTHONPATH=paths, PYTHONDONTWRITEBYTECODE="1")
    return json.loads(said.splitlines()[-1])


def test_executed(benchmark: Any, request: pytest.FixtureRequest) -> None:
    """Check every kernel's results, then count; with ``--results`` write the file."""
    if "TINYGRAD" not in os.environ:
        pytest.skip("TINYGRAD: expected a checkout for tests/emulated/run.sh, got none")
    lines = benchmark.pedantic(_counted, rounds=1)
    for line in lines:
        worst = max(line["errors"].values())
        assert worst < (_ERROR[line["dtype"]] if is_ours(line["provider"]) else _OF_OTHERS), line
    compiled = [line for target in tables.TARGETS for line in _counted(target)]
    folder = request.config.getoption("--results")
    path = (folder / tables.EXECUTED.name) if folder else ROOT / "build" / tables.EXECUTED.name
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"environment": environment("cpu"), "executed": lines, "compiled": compiled}
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(tables.executed(path))
