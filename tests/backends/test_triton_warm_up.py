"""What Triton compiles for steps of any number of rows, and that warm_up compiles all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LINEAR = {"linear_stats_kernel": 1, "_merge_splits_kernel": 1}
FUSED = {"_row_loss_kernel": 1, "_scale_kernel": 2, "_dlogits_kernel": 1}


def steps(*cases: str, seed: int = 0) -> dict[str, Any]:
    """Run ``warm_up_steps`` in a process without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment["PYTHONHASHSEED"] = str(seed)
    command = [sys.executable, "-m", "tests.backends.warm_up_steps", *cases]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return steps()


def test_after_warm_up_no_number_of_rows_compiles(found: dict[str, Any]) -> None:
    assert {name: case["missing"] for name, case in found.items() if case["missing"]} == {}


def test_warm_up_compiles_nothing_that_no_step_launches(found: dict[str, Any]) -> None:
    assert {name: case["unused"] for name, case in found.items() if case["unused"]} == {}


def test_how_many_variants_are_compiled(found: dict[str, Any]) -> None:
    """One of each kernel, but for two dtypes of a sum and a gradient with and without entropy."""
    assert found["plain"]["step"] == {"_row_loss_kernel": 1, "_scale_kernel": 1}
    assert found["plain"]["warm"] == {**LINEAR, **FUSED}
    assert found["persistent"]["warm"] == {**LINEAR, **FUSED}
    assert found["invariant"]["warm"] == {**LINEAR, "_dlogits_kernel": 1}
    rows = {"_row_stats_kernel": 1, "_dlogits_kernel": 2, "_scale_kernel": 2}
    assert found["sequences"]["warm"] == {**LINEAR, **rows, "_segment_sum_kernel": 1}
    assert found["masks"]["warm"] == {**rows, "_pointwise_kernel": 1}


def test_another_process_asks_for_the_same_kernels(found: dict[str, Any]) -> None:
    """So it finds them in the cache on disk."""
    names = ("plain", "masks")
    again = steps(*names, seed=1)
    assert all(again[name]["digests"] == found[name]["digests"] for name in names)
