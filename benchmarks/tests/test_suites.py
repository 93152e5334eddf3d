"""Every benchmark as a user runs it, on its smallest case."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from benchmarks.conftest import SUITES, notes
from benchmarks.results import ROOT, Row, load
from benchmarks.test_training import measure_training
from benchmarks.training import SIZES, TRAINERS, TrainingConfig
from tests.support.launch import execute

NAMES = [path.stem.removeprefix("test_") for path in sorted((ROOT / "benchmarks").glob("test_*"))]
INTERPRETED = ("anchored", "entries", "rounding", "row_kernel", "tiles")
_UNTIMED = ("accuracy", "sparsity", "mismatch", "curves", "optimizers", "states", "updates")
_UNTIMED += ("routing",)
_MODULES = {name: importlib.import_module(f"benchmarks.test_{name}") for name in NAMES}
# the others print tables of pytest-benchmark or a profiler
_WITH_ROWS = [name for name, module in _MODULES.items() if hasattr(module, "CASES")]
OURS = TRAINERS["ours"]


def _pytest(*words: str, **variables: str) -> str:
    options = "-q", "-p", "no:cacheprovider", "--benchmark-only"
    return execute("-m", "pytest", *words, *options, limit=1800.0, **variables)


@pytest.mark.long
@pytest.mark.parametrize("interprets", [False, True], ids=["compiled", "interpreted"])
def test_benchmarks_as_they_are_run(
    interprets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    names = [name for name in NAMES if (name in INTERPRETED) == interprets]
    paths = [str(ROOT / f"benchmarks/test_{name}.py") for name in names]
    options = ["--suite", "tiny", "--results", str(tmp_path / "results")]
    options += ["--benchmark-json", str(tmp_path / "out.json")]
    printed = _pytest(*paths, *options, TRITON_INTERPRET=str(int(interprets)))
    names = [name for name in names if name in _WITH_ROWS]
    ((_, groups),) = load(tmp_path / "results").items()
    for name in names:
        rows = [row for group in groups if group.benchmark == name for row in group.rows]
        facts = [group.facts for group in groups if group.benchmark == name]
        assert facts == [case.facts() for case in _MODULES[name].CASES["tiny"]]
        _check(name, rows, " ".join(printed.split()))
    announced = re.findall(r"^measuring (.+): ", printed, re.M)
    assert announced == [str(case) for name in names for case in _MODULES[name].CASES["tiny"]]
    timed = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    samples = [
        second
        for each in timed
        if each["group"] and each["group"].startswith("table of ")
        for second in each["stats"]["data"]
        if second
    ]
    every = [second for group in groups for row in group.rows for second in row.seconds]
    assert sorted(samples) == pytest.approx(sorted(every))


def _check(name: str, rows: Sequence[Row], said: str) -> None:
    module = _MODULES[name]
    expected = {each for case in module.CASES["tiny"] for each in notes(module, case)}
    assert all(each in said for each in expected), name
    if name == "backwards":  # a work and its provider
        expected = {each.split()[1] for each in expected}
    assert {row.provider for row in rows} == expected, name
    assert any(row.runs for row in rows) and not any(row.state == "wrong" for row in rows), name
    assert name in _UNTIMED or all(row.seconds for row in rows if row.runs), name
    if name == "curves":
        _check_curves({row.provider: row.info for row in rows if row.runs})


def _check_curves(runs: dict[str, dict[str, Any]]) -> None:
    """Check that all trainers sample the same completions, in steps and in evaluations."""
    for name in ("rewards", "losses", "gradient_norms", "held_out"):
        for one, other in combinations(("ours", "trl", "trl-our-head"), 2):
            assert runs[one][name] == pytest.approx(runs[other][name], rel=1e-4, abs=1e-6)
        assert runs["ours-lora"][name] == pytest.approx(runs["trl-lora"][name], rel=1e-4, abs=1e-6)


def test_the_first_line_says_which_suite_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    printed = _pytest(str(ROOT / "benchmarks"), "--collect-only")
    assert re.match(r"quick suite: .* about five minutes .*; --full runs all \d+ ", printed)
    collected = re.findall(r"benchmarks/test_\w+\.py", printed)
    assert set(collected) == {"benchmarks/test_heads.py"}


@pytest.mark.parametrize("name", _WITH_ROWS)
def test_suites_have_no_case_twice(name: str) -> None:
    cases = _MODULES[name].CASES
    for suite, found in cases.items():
        assert suite in SUITES and len({str(case) for case in found}) == len(found) > 0
    assert cases["tiny"]


@pytest.mark.slow
def test_a_trainer_that_is_wrong_or_breaks_has_no_time() -> None:
    """Neither has a trainer with less work in its steps."""

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
    runs = [(Row(f"ours {number}"), x) for number, x in enumerate([OURS, *broken.values()])]
    measure_training(SIZES["tiny"], runs, "cpu", 1)
    right, *rows = [row for row, _ in runs]
    assert right.runs and len(right.seconds) == 1
    parts = right.info["generate_seconds"] + right.info["train_seconds"]
    assert right.seconds[0] == pytest.approx(parts)
    for row, reason in zip(rows, broken, strict=True):
        assert row.seconds == [] and reason in row.reason
    assert [row.state for row in rows] == ["wrong"] * 3 + ["absent"]
