"""A run that is killed at any point and resumed logs what it would have logged, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from tests.support.trainer import logged, parameters
from tests.trainer import killed_runs

pytestmark = pytest.mark.slow

SCRIPT = Path(killed_runs.__file__)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    trainer = killed_runs.trainer(tmp_path_factory.mktemp("straight"))
    trainer.train()
    return trainer


@pytest.mark.parametrize("death", killed_runs.DEATHS)
def test_resumed_run_is_the_straight_run(killed, straight, death, caplog):
    folder = killed / death
    last = folder / f"checkpoint-{killed_runs.DEATHS[death]}"
    assert get_last_checkpoint(folder) == str(last)
    resumed = killed_runs.trainer(folder)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == logged(straight)
    assert torch.equal(parameters(resumed.model), parameters(straight.model))
    reported = "is an unfinished checkpoint and is ignored" in caplog.text
    assert reported == (death in ("save", "before rename", "deletion"))
