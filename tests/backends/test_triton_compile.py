"""Every Triton kernel compiles for every target, and warm_up compiles all that steps launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.backends.compile_gate import command, fits

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
WARM_UP = [sys.executable, "-m", "tests.backends.warm_up_steps"]


def environment(**variables: str) -> dict[str, str]:
    """Return that of a process without the interpreter, which replaces triton.jit at import."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | variables


# All of NVIDIA's have the tiles of rows of sm_90, where every variant is compiled.
@pytest.mark.parametrize(
    "targets",
    (("sm_90", "--largest", "sm_100"), ("--largest", "sm_80", "sm_120"), ("gfx942",)),
    ids=" ".join,
)
def test_kernels_compile(targets: tuple[str, ...], tmp_path: Path) -> None:
    run = subprocess.run(
        command(*targets),
        capture_output=True, text=True, cwd=ROOT, env=environment(TRITON_CACHE_DIR=str(tmp_path)),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    for result in lines:
        if "counts" in result:
            continue
        assert fits(result), result
        by_copies = result["case"].startswith("anchored_kernel x_ptr:tensordesc")
        if by_copies and result["target"] == "sm_90":
            assert result["registers"] <= 188, result  # half of a multiprocessor's are accumulators
    if "sm_90" in targets:
        check_row_loops([line for line in lines if "counts" in line])


def check_row_loops(loops: list[dict[str, Any]]) -> None:
    """Rows are summed within threads, and stored in vectors."""
    stores_of: dict[bool, set[str]] = {True: set(), False: set()}
    for loop in loops:
        counts = loop["counts"]
        stores = {name for name in counts if name.startswith("STG")}
        stores_of[loop["aligned"]] |= stores
        # of the anchor's maximum only: over the lanes of a warp, then over four warps
        shuffles = sum(count for name, count in counts.items() if name.startswith("SHFL"))
        assert shuffles <= (7 if stores else 0), loop
        assert not any(name.startswith("STS.") for name in counts), loop  # another layout
    # four columns and eight of bf16; one where rows begin anywhere
    assert stores_of == {True: {"STG.E.64", "STG.E.128"}, False: {"STG.E.U16"}}


def test_warm_up_compiles_what_steps_of_any_number_of_rows_launch() -> None:
    run = subprocess.run(WARM_UP, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found and {name: calls for name, calls in found.items() if calls} == {}


def test_one_process_of_a_machine_compiles_for_all_unless_it_fails(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [*WARM_UP, str(tmp_path), str(rank)],
            stdout=subprocess.PIPE, cwd=ROOT, env=environment(OMP_NUM_THREADS="1"), text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in processes]
    assert all(outputs)
    (failed, first), (retried, second) = (json.loads(text.splitlines()[-1]) for text in outputs)
    kernels = ["_merge_splits_kernel", "linear_stats_kernel"]
    assert failed == {"compiled": [], "found": [], "error": "no compiler"}
    assert sorted(retried["compiled"]) == sorted(first["compiled"]) == kernels
    assert second["compiled"] == [] and set(second["found"]) == set(kernels)
    assert first["error"] is retried["error"] is second["error"] is None
