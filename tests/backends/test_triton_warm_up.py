"""What Triton compiles for steps of any number of rows, and that warm_up compiles all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LINEAR = {"linear_stats_kernel": 1, "_merge_splits_kernel": 1}
FUSED = {"_row_loss_kernel": 1, "_scale_kernel": 2, "_dlogits_kernel": 1}


def environment(**variables: str) -> dict[str, str]:
    """Return that of a process without the interpreter."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | variables


def steps(*cases: str, seed: int = 0) -> dict[str, Any]:
    """Run ``warm_up_steps``."""
    command = [sys.executable, "-m", "tests.backends.warm_up_steps", *cases]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(PYTHONHASHSEED=str(seed))
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def two_processes(folder: Path, fate: str) -> list[dict[str, Any] | None]:
    """Run ``warm_up_processes``; return what each says, None of one that was killed."""
    variables = environment(TRITON_CACHE_DIR=str(folder / "cache"), OMP_NUM_THREADS="1")
    words = [sys.executable, "-m", "tests.backends.warm_up_processes", str(folder)]
    processes = [
        subprocess.Popen(
            [*words, str(rank), fate], stdout=subprocess.PIPE, cwd=ROOT, env=variables, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate()[0] for process in processes]
    return [json.loads(each.splitlines()[-1]) if each else None for each in said]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return steps()


def test_after_warm_up_no_number_of_rows_compiles(found: dict[str, Any]) -> None:
    assert {name: case["missing"] for name, case in found.items() if case["missing"]} == {}


def test_warm_up_compiles_nothing_that_no_step_launches(found: dict[str, Any]) -> None:
    assert {name: case["unused"] for name, case in found.items() if case["unused"]} == {}


def test_how_many_variants_are_compiled(found: dict[str, Any]) -> None:
    """One of each kernel, but for two dtypes of a sum."""
    assert found["plain"]["step"] == {"_row_loss_kernel": 1, "_scale_kernel": 1}
    assert found["plain"]["warm"] == {**LINEAR, **FUSED}
    assert found["persistent"]["warm"] == {**LINEAR, **FUSED}
    assert found["invariant"]["warm"] == {**LINEAR, "_dlogits_kernel": 1}
    rows = {"_row_stats_kernel": 1, "_dlogits_kernel": 1, "_scale_kernel": 2}
    assert found["sequences"]["warm"] == {**LINEAR, **rows, "_segment_sum_kernel": 1}
    assert found["masks"]["warm"] == {**rows, "_pointwise_kernel": 1}


def test_another_process_asks_for_the_same_kernels(found: dict[str, Any]) -> None:
    """So it finds them in the cache on disk."""
    names = ("plain", "masks")
    again = steps(*names, seed=1)
    assert all(again[name]["digests"] == found[name]["digests"] for name in names)


def test_one_process_of_a_machine_compiles_for_all(tmp_path: Path) -> None:
    first, second = two_processes(tmp_path, "works")
    assert first is not None and first["error"] is None
    assert Counter(first["compiled"]) == Counter({**LINEAR, **FUSED})
    assert second is not None and second["error"] is None
    assert second["compiled"] == [] and set(second["found"]) == set(first["compiled"])


@pytest.mark.parametrize(
    ("fate", "error"),
    [("gets a bad argument", "schedule: expected one of"), ("cannot compile", "no compiler")],
)
def test_nobody_waits_for_a_process_that_failed(tmp_path: Path, fate: str, error: str) -> None:
    first, second = two_processes(tmp_path, fate)
    assert first is not None and first["error"].startswith(error) and first["compiled"] == []
    assert second is not None and second["error"] is None
    assert Counter(second["compiled"]) == Counter(LINEAR)


def test_a_process_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    first, second = two_processes(tmp_path, "is killed")
    assert first is None
    assert second is not None and second["error"] and second["compiled"] == []
