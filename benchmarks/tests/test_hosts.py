"""Steps of other trainers: the same as their own, and every way is timed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.hosts import WORKS
from benchmarks.hosts.measure import measure_host
from benchmarks.hosts.work import NO_HEAD, THEIRS
from benchmarks.report import show
from benchmarks.tests.stored import device, run


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "trl: GRPOTrainer, LoRA",
        "trl: DPOTrainer, all weights",
        "liger-kernel: LigerFusedLinearGRPOLoss",
    ],
)
def test_every_way_is_right_and_timed(name: str, tmp_path: Path) -> None:
    work = WORKS[name]
    table = measure_host(work, 1, full=False)
    assert tuple(row.provider for row in table.rows) == work.arms
    for row in table.rows:
        assert row.failure is None
        assert len(row.seconds) == 1
        if row.provider not in (THEIRS, NO_HEAD):
            assert max(row.errors["loss"], row.errors["gradient"]) < 1e-5
    stored = {k: v for k, v in asdict(table).items() if k != "environment"}
    shown = show("hosts", "cpu", {"test-cpu": device(tmp_path, run([], hosts=[stored]))})
    assert work.name in shown
    assert "FAILED" not in shown
