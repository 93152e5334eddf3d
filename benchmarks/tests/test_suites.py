"""Every benchmark as a user runs it, on its smallest case."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from benchmarks.conftest import SUITES
from benchmarks.results import ROOT, load
from benchmarks.test_training import PROVIDERS, measure_training
from benchmarks.training import SIZES, TrainingConfig
from tests.support.launch import execute

NAMES = (
    *("heads", "divergence", "savings", "backwards", "accuracy", "sharded"),
    *("row_kernel", "rounding", "anchored", "waits", "exactness", "skipping", "lora"),
    *("products", "tiles", "hosts", "training", "rollouts", "padding"),
    *("real", "curves", "states", "updates", "sparsity", "mismatch", "activations"),
    *("vocabulary", "prefixes", "asynchronous", "routing"),
)
_UNTIMED = ("accuracy", "sparsity", "mismatch", "curves", "states", "updates", "routing")
INTERPRETED = ("tiles", "row_kernel", "rounding", "anchored")
OURS = PROVIDERS[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_as_it_is_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    options = ["--benchmark-only", "--suite", "tiny", "--results", str(tmp_path / "results")]
    options += ["--benchmark-json", str(tmp_path / "out.json"), "-p", "no:cacheprovider"]
    words = "-m", "pytest", str(ROOT / f"benchmarks/test_{name}.py"), "-q", *options
    printed = execute(*words, TRITON_INTERPRET=str(int(name in INTERPRETED)))
    module = importlib.import_module(f"benchmarks.test_{name}")
    ((_, found),) = load(tmp_path / "results").items()
    assert [group.facts for group in found] == [case.facts() for case in module.CASES["tiny"]]
    expected = {each for case in module.CASES["tiny"] for each in module.names(case)}
    if name == "backwards":  # a work and who does it
        expected = {each.split()[1] for each in expected}
    rows = [row for group in found for row in group.rows]
    if name == "curves":
        _check_curves({row.provider: row.info for row in rows if row.runs})
    assert {row.provider for row in rows} == expected
    assert any(row.runs for row in rows) and not any(row.state == "wrong" for row in rows)
    timed = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert len(timed) == sum(row.runs for row in rows)
    replayed = [second for each in timed for second in each["stats"]["data"] if second]
    assert sorted(replayed) == pytest.approx(sorted(x for row in rows for x in row.seconds))
    assert name in _UNTIMED or all(row.seconds for row in rows if row.runs)
    announced = re.findall(r"^measuring (.+): ", printed, re.M)
    assert announced == [str(case) for case in module.CASES["tiny"]]
    said = " ".join(printed.split())
    assert all(each in said for each in expected)


def _check_curves(runs: dict[str, dict[str, Any]]) -> None:
    """Check that all trainers sample the same completions, in steps and in evaluations."""
    for name in ("rewards", "losses", "gradient_norms", "held_out"):
        for one, other in combinations(("ours", "trl", "trl-our-head"), 2):
            assert runs[one][name] == pytest.approx(runs[other][name], rel=1e-4, abs=1e-6)
        assert runs["ours-lora"][name] == pytest.approx(runs["trl-lora"][name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_suites_have_no_case_twice(name: str) -> None:
    cases = importlib.import_module(f"benchmarks.test_{name}").CASES
    for suite, found in cases.items():
        assert suite in SUITES and len({str(case) for case in found}) == len(found) > 0
    assert cases["tiny"]


@pytest.mark.slow
def test_a_trainer_that_is_wrong_or_breaks_has_no_time() -> None:
    """Nor one whose steps had less work."""

    def raising(*arguments: object) -> None:
        raise RuntimeError("broken on purpose")

    def dawdling(config: TrainingConfig, *rest: object) -> object:
        return OURS.run(replace(config, completion_tokens=2), *rest)

    broken = {
        "error of loss ": replace(OURS, run=partial(OURS.run, epsilon=0.01, epsilon_high=0.01)),
        "RuntimeError: broken on purpose": replace(OURS, run=raising),
        "completions of 2.0 tokens; expected": replace(OURS, run=dawdling),
        "needs no-such-package": replace(OURS, packages=("no-such-package",)),
    }
    right, *rows = measure_training(SIZES["tiny"], [OURS, *broken.values()], "cpu", 1)
    assert right.runs and len(right.seconds) == 1
    parts = right.info["generate_seconds"] + right.info["train_seconds"]
    assert right.seconds[0] == pytest.approx(parts)
    for row, reason in zip(rows, broken, strict=True):
        assert row.seconds == [] and reason in row.reason
    assert [row.state for row in rows] == ["wrong"] * 3 + ["absent"]
