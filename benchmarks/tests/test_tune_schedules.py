"""``python -m benchmarks.tune --schedules``: the fit, its judgement, and the table of speeds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.tune import command, rates, schedules
from benchmarks.tune.fit import DTYPES, Sample, fit, verdict
from grpo_kernels.tools.estimate import Speed
from grpo_kernels.tools.estimate.cost import FITTED, SCHEDULES

TRUE = Speed(
    matrix=1.5e12, sums=1.2e12, fused=2.5e12, wide_matrix=3e11, bandwidth=1.5e10, adding=4e9,
    piece=2e-3, call=1e-3, where="a test", source="a test",
)  # fmt: skip
ENVIRONMENT = {
    "device": "Test CPU",
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "threads": 2,
    "versions": {"torch": "2.13.0"},
}
EMPTY = rates.RatesTable(measured_on={}, rates={})


def timed(speed: Speed = TRUE) -> list[Sample]:
    """The grid as a machine of this speed would measure it."""
    return [
        replace(x, seconds={name: [x.work(name).seconds(speed)] * 3 for name in SCHEDULES})
        for x in schedules.grid("cpu")
    ]


def test_the_fit_finds_the_speeds_behind_the_times() -> None:
    row = dict(zip(FITTED, fit([x for x in timed() if x.dtype == "bf16"]), strict=True))
    for name, value in row.items():
        assert value == pytest.approx(TRUE.rate(name), rel=0.05), name
    fp32 = dict(zip(FITTED, fit([x for x in timed() if x.dtype == "fp32"]), strict=True))
    assert fp32["sums"] == fp32["matrix"] == pytest.approx(TRUE.matrix, rel=0.05)


def test_the_verdict_counts_wrong_choices() -> None:
    samples = timed()
    right = verdict(samples, dict.fromkeys(DTYPES, TRUE))
    assert right.right == right.count == len(samples) and right.worst == 1.0
    assert {x.measured("one_pass") < x.measured("two_pass") for x in samples} == {True, False}
    swapped = [replace(x, seconds=dict(zip(SCHEDULES, [*x.seconds.values()][::-1], strict=True)))
               for x in samples]  # fmt: skip
    wrong = verdict(swapped, dict.fromkeys(DTYPES, TRUE))
    assert wrong.right == 0 and wrong.worst > 1.0
    assert f"faster schedule in 0 of {len(samples)} cases" in str(wrong)
    assert str(wrong.misses[0][0]) in str(wrong)


def test_every_grid_holds_both_dtypes_and_heads() -> None:
    for device in ("cpu", "cuda"):
        found = schedules.grid(device)
        assert len({str(x) for x in found}) == len(found) > 40
        assert {x.dtype for x in found} == set(DTYPES)
        assert {x.frozen for x in found} == {False, True}
        assert {x.precision for x in found} == {"fp32", "input"}
        assert any(x.max_workspace_bytes for x in found)


def test_the_table_survives_being_written_and_read(tmp_path: Path) -> None:
    data = {"device_class": "cpu test", "environment": ENVIRONMENT}
    samples = [{**asdict(x)} for x in timed()]
    table, _ = schedules.fitted(EMPTY, {**data, "samples": samples})
    path = tmp_path / "rates.py"
    table.write(path)
    assert rates.read(path) == table
    assert set(table.rates) == {("cpu test", "fp32"), ("cpu test", "bf16")}
    assert table.measured_on["cpu test"]["device"] == "Test CPU"
    if ruff := shutil.which("ruff"):
        subprocess.run([ruff, "format", "--check", "--line-length", "100", path], check=True)
    both, _ = schedules.fitted(table, {**data, "device_class": "other", "samples": samples})
    assert set(both.measured_on) == {"cpu test", "other"} and len(both.rates) == 4


def test_the_table_in_the_package_is_as_the_command_writes_it() -> None:
    assert rates.read().text() == rates.PATH.read_text()


def test_a_tiny_grid_is_measured_and_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [
        schedules._sample("cpu", tokens=16, hidden=8, vocabulary=100, dtype=dtype, frozen=frozen)
        for dtype in DTYPES
        for frozen in (False, True)
    ]
    monkeypatch.setattr(schedules, "grid", lambda device: few)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tune", "--schedules", "--dry-run", "--out", str(tmp_path)])
    assert command.main() == 0
    printed = capsys.readouterr().out
    assert "T=16 D=8 V=100, bf16" in printed and "RATES: dict" in printed
    assert "of 4 cases" in printed and "written" not in printed
    (stored,) = (tmp_path / "tune").glob("*-schedules.json")
    samples = json.loads(stored.read_text())["samples"]
    assert len(samples) == 4 and all(len(x["seconds"]["one_pass"]) == 3 for x in samples)
    again = ["tune", "--schedules", "--dry-run", "--table-from", str(stored)]
    monkeypatch.setattr(sys, "argv", again)
    assert command.main() == 0 and "of 4 cases" in capsys.readouterr().out


def test_the_grid_ends_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(schedules.measure(schedules.grid("cpu"), lambda call: 1.0, end=0.0)) == []
    assert "the time was up" in capsys.readouterr().out
