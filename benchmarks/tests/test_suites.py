"""Every benchmark as a user runs it, on its smallest case: rows for all, a file and tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import (
    test_accuracy,
    test_backwards,
    test_heads,
    test_hosts,
    test_products,
    test_rollouts,
    test_savings,
    test_sharded,
    test_tiles,
    test_training,
)
from benchmarks.conftest import SUITES
from benchmarks.environment import ROOT
from benchmarks.results import load
from benchmarks.training import SIZES
from benchmarks.test_training import PROVIDERS

OURS = PROVIDERS[0]
MODULES = {
    "heads": test_heads,
    "savings": test_savings,
    "backwards": test_backwards,
    "accuracy": test_accuracy,
    "sharded": test_sharded,
    "products": test_products,
    "tiles": test_tiles,
    "hosts": test_hosts,
    "training": test_training,
    "rollouts": test_rollouts,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_as_it_is_run(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", f"benchmarks/test_{name}.py", "-q"]
    options = ["--benchmark-only", "--suite", "tiny", "--results", str(tmp_path / "results")]
    options += ["--benchmark-json", str(tmp_path / "out.json"), "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": str(int(name == "tiles"))}
    environment.pop("PYTEST_XDIST_WORKER", None)
    run = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-5000:]
    cases = MODULES[name].CASES["tiny"]
    ((_, found),) = load(tmp_path / "results").items()
    assert [group.facts for group in found] == [case.facts() for case in cases]
    expected = {each for case in cases for each in MODULES[name].names(case)}
    if name == "backwards":  # a work and who does it
        expected = {each.split()[1] for each in expected}
    assert {row.provider for group in found for row in group.rows} == expected
    rows = [row for group in found for row in group.rows]
    assert any(row.runs for row in rows) and not any(row.state == "wrong" for row in rows)
    timed = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert len(timed) == sum(row.runs for row in rows)
    replayed = [second for each in timed for second in each["stats"]["data"] if second]
    assert sorted(replayed) == pytest.approx(sorted(x for row in rows for x in row.seconds))
    assert name == "accuracy" or all(row.seconds for row in rows if row.runs)
    hidden = {"no head"} if name == "hosts" else set()
    said = " ".join(run.stdout.split())
    assert all(each in said for each in expected - hidden)


@pytest.mark.parametrize("module", MODULES.values(), ids=list(MODULES))
def test_suites_have_no_case_twice(module) -> None:
    for suite in SUITES:
        names = [str(case) for case in module.CASES[suite]]
        assert len(names) == len(set(names))
    assert module.CASES["tiny"]


@pytest.mark.slow
def test_a_trainer_that_is_wrong_or_breaks_has_no_time() -> None:
    """Nor one whose steps had less work."""

    def wrong(batch):
        return OURS.inputs(batch | {"advantages": 1.2 * batch["advantages"]})

    def raising(job):
        raise RuntimeError("broken on purpose")

    def dawdling(job):
        return OURS.build(replace(job, config=replace(job.config, completion_tokens=2)))

    broken = {
        "error of loss 2.0e-01, gradient 2": replace(OURS, inputs=wrong),
        "RuntimeError: broken on purpose": replace(OURS, build=raising),
        "completions of [2.0] tokens; expected": replace(OURS, build=dawdling),
        "needs no-such-package": replace(OURS, requires=("no-such-package",)),
    }
    case = SIZES["tiny"]
    right, *rows = test_training.measure_training(case, [OURS, *broken.values()], "cpu", 1)
    assert right.runs and len(right.seconds) == 1
    parts = right.info["generate_seconds"] + right.info["train_seconds"]
    assert right.seconds[0] == pytest.approx(parts)
    for row, reason in zip(rows, broken, strict=True):
        assert row.seconds == [] and reason in row.reason
    assert [row.state for row in rows] == ["wrong"] * 3 + ["absent"]


def test_a_batch_has_to_be_cut_evenly() -> None:
    with pytest.raises(ValueError, match="micro_batches: expected a divisor of the 8"):
        replace(SIZES["quick"], micro_batches=3)
