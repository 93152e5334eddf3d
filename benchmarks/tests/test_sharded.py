"""The table of a head over several ranks: right results, and every byte counted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.report import show
from benchmarks.shapes import MODELS, Case
from benchmarks.sharded.arms import ARMS
from benchmarks.sharded.measure import measure_sharded
from benchmarks.tests.stored import device, run
from benchmarks.work import WORKS


@pytest.mark.slow
def test_every_arm_is_right_and_timed(tmp_path: Path) -> None:
    case = Case(MODELS["tiny"], 32, "fp32", WORKS["dapo"])
    table = measure_sharded(case, 2, 1, memory=False)
    assert [row.provider for row in table.rows] == list(ARMS)
    for row in table.rows:
        if row.absent is not None:
            assert ARMS[row.provider].needs == "deepspeed"
            continue
        assert row.failure is None and len(row.seconds) == 1
        assert {"loss", "dhidden", "dweight"} <= row.errors.keys()
    by_name = {row.provider: row for row in table.rows}
    agreed = 5 * 8  # what the ranks compare first
    assert by_name["ours, vocabulary"].sent == 32 * (32 + 4 * case.model.hidden) + agreed
    stored = {k: v for k, v in asdict(table).items() if k != "environment"}
    shown = show("sharded", "cpu", {"test-cpu": device(tmp_path, run([], sharded=[stored]))})
    assert "ours, vocabulary" in shown and "FAILED" not in shown
