"""A resumed run is the straight run to the bit, whatever it has switched on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import left_behind
from tests.trainer.checkpoint.features import FEATURES, SAVED, STEPS, trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("uncompiled"),
    pytest.mark.filterwarnings("ignore"),  # peft's, on tied weights and switched adapters
]


@pytest.mark.parametrize("feature", FEATURES)
def test_resumed_run_is_the_straight_run(feature, tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"

    def run(folder: Path, **resume):
        changes = FEATURES[feature]
        made = trainer(changes() if callable(changes) else changes, folder)
        made.train(**resume)
        assert made.state.global_step == STEPS
        last = left_behind.checkpoint(folder / f"checkpoint-{STEPS}")
        written = left_behind.completions(folder, after=SAVED)
        return left_behind.rows(made.state.log_history), last, written

    logged, last, written = run(straight)
    shutil.copytree(straight / f"checkpoint-{SAVED}", resumed / f"checkpoint-{SAVED}")
    again = run(resumed, resume_from_checkpoint=True)
    assert again[0] == logged
    assert again[2] == written and written
    assert again[1] == last and "optimizer.pt" in last
