"""Result files: the stored ones are well-formed, a broken one is an error, the newest counts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import environment as machine
from benchmarks.accuracy.measure import measure_accuracy
from benchmarks.providers import PROVIDERS
from benchmarks.results import KINDS, RESULTS, Collector, Row, Table, load, load_run
from benchmarks.shapes import MODELS, Case
from benchmarks.tests.stored import NEWER, device, row, run, table
from benchmarks.work import WORKS


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("*/????-??-??-*.json")), ids=lambda path: path.stem
)
def test_a_stored_file_is_well_formed(path: Path) -> None:
    found = load_run(path)
    assert found.environment.kind in ("cpu", "cuda") and found.environment.versions["torch"]
    assert path.parent.name == machine.slug(found.environment.device)
    assert path.name.startswith(f"{found.environment.day}-{found.environment.commit[:12]}")
    assert any(getattr(found, kind) for kind in KINDS)
    for each in found.tables:
        names = [one.provider for one in each.rows]
        assert names and len(names) == len(set(names))
        for one in each.rows:
            assert one.note and all(seconds > 0 for seconds in one.seconds)
            assert one.runs or not one.seconds, "a time beside a reason for having none"
            assert not one.runs or all(value < 1 for value in one.errors.values())


@pytest.mark.parametrize(
    "data, message",
    [
        ({"work": "loss"}, "missing required field `environment`"),
        ([], "Expected `object`, got `array`"),
        (run([table([{"provider": "ours"}])]), r"missing required field `note`.*\.rows\[0\]"),
        (run([table([row("ours", errors={"loss": "1"})])]), "Expected `float`, got `str`.*errors"),
        (run([table([row("ours", alone=1)])]), "Expected `bool`, got `int`.*alone"),
        (run([], training=[{"tokens": 3}]), r"missing required field `model`.*training\[0\]"),
        (
            run([table([], work="fly")]),
            r"work: expected one of logprobs, .* got 'fly'.*tables\[0\]",
        ),
        (run([table([], tokens="many")]), "Expected `int`, got `str`.*tokens"),
    ],
)
def test_a_broken_file_is_an_error(tmp_path: Path, data: Any, message: str) -> None:
    path = tmp_path / "test-cpu" / "2026-01-02-abc.json"
    path.parent.mkdir()
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"2026-01-02-abc.json: .*{message}"):
        load(tmp_path)


def test_what_is_no_json_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"environment": ')
    with pytest.raises(ValueError, match=r"broken.json: Expecting value"):
        load_run(tmp_path / "broken.json")


def test_the_newest_file_that_has_a_case_counts(tmp_path: Path) -> None:
    old = run([table([row("ours", [1.0])]), table([row("ours", [1.0])], dtype="bf16")])
    new = run([table([row("ours", [2.0])])], environment=NEWER)
    found = {t.dtype: t for t in device(tmp_path, new, old).tables}
    assert found["fp32"].rows[0].seconds == [2.0] and found["fp32"].environment.day == "2026-02-03"
    assert found["bf16"].rows[0].seconds == [1.0] and found["bf16"].environment.day == "2026-01-02"


def test_what_is_collected_can_be_read(tmp_path: Path) -> None:
    """Every token too, a list of numbers in a line; and the NaN of a failure."""
    case = Case(MODELS["tiny"], 32, "bf16", WORKS["logprobs-entropy"])
    measured = measure_accuracy(case, "cpu", providers=[PROVIDERS["eager"]])
    failed = Table(**table([]))
    failed.rows = [Row(**row("eager", failure="error of loss nan", errors={"loss": math.nan}))]
    collector = Collector(tmp_path, "cpu")
    collector.add("accuracy", measured)
    collector.add("tables", failed)
    found = load_run(collector.path)
    assert found.accuracy[0].rows == measured.rows and found.accuracy[0].logprobs
    assert math.isnan(found.tables[0].rows[0].errors["loss"])
    assert len(collector.path.read_text().splitlines()) < 100
    again = Collector(tmp_path, "cpu")
    again.add("accuracy", measured)
    assert again.path != collector.path and collector.path.exists()
