"""A run that is ended, anywhere and by anything, and resumed is the straight run to the bit."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from grpo_trainer.checkpoint import files
from tests.chaos import ROOT
from tests.support import left_behind
from tests.trainer.checkpoint.features import SYNCED, trainer

pytestmark = pytest.mark.slow

# steps 3 and 6 are in the middle of a generation batch, of a window of logs, and are saved
CHANGES = SYNCED | {
    "steps_per_generation": 2, "dynamic_sampling": True, "use_adaptive_entropy": True,
    "entropy_target": 5.0, "logging_steps": 2, "max_steps": 8, "save_steps": 3,
    "save_total_limit": 1,
}  # fmt: skip


def test_at_random_moments(tmp_path):
    command = [sys.executable, "-m", "tests.chaos", "--kills", "5", "--seed", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def left(made) -> list:
    """Return what a run that is through has left."""
    out = Path(made.args.output_dir)
    names = sorted(path.name for path in out.iterdir())
    last = out / f"checkpoint-{made.state.max_steps}"
    logged = left_behind.rows(made.state.log_history)
    return [names, left_behind.checkpoint(last), left_behind.completions(out), logged]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> list:
    made = trainer(CHANGES, tmp_path_factory.mktemp("straight"))
    made.train()
    return left(made)


def assert_goes_on(folder: Path, straight: list, newest: int) -> None:
    names = [path.name for path in folder.glob("checkpoint-*")]
    assert max(names) == f"checkpoint-{newest}"
    resumed = trainer(CHANGES, folder)
    resumed.train(resume_from_checkpoint=True)
    assert left(resumed) == straight


class _Killed(BaseException):
    """Stands for the death of the process."""


def _die(*args, **kwargs):
    raise _Killed


def _half_a_file(value, path, **kwargs):
    Path(path).write_bytes(b"half of it")
    raise _Killed


def _half_a_folder(path, **kwargs):
    if (Path(path) / "model.safetensors").exists():
        (Path(path) / "model.safetensors").unlink()
        raise _Killed


class At(TrainerCallback):
    """Does something at one moment of a run, once."""

    def __init__(self, moment: str, step: int, action) -> None:
        def see(args, state, control, **kwargs):
            if state.global_step == step and left:
                left.pop()
                action()

        left = [True]
        setattr(self, moment, see)


@pytest.mark.parametrize(
    ("owner", "name", "dies", "newest"),
    [
        (torch, "save", _half_a_file, 3),
        (files, "_publish", _die, 3),
        (shutil, "rmtree", _half_a_folder, 6),
    ],
    ids=["writing", "before the renaming", "deleting the one before"],
)
def test_at_a_checkpoint(tmp_path, straight, monkeypatch, caplog, owner, name, dies, newest):
    dying = trainer(CHANGES, tmp_path)
    with monkeypatch.context() as patches:
        dying.add_callback(At("on_step_begin", 5, lambda: patches.setattr(owner, name, dies)))
        with pytest.raises(_Killed):
            dying.train()
    assert_goes_on(tmp_path, straight, newest)
    assert "is an unfinished checkpoint and is deleted" in caplog.text


def presses(times: int = 1):
    return lambda: [signal.raise_signal(signal.SIGINT) for _ in range(times)]


@pytest.mark.parametrize(
    ("moment", "step", "saved"),
    [("on_train_begin", 0, 1), ("on_save", 3, 3), ("on_step_begin", 7, 8)],
)
def test_by_ctrl_c(tmp_path, straight, moment, step, saved, capfd):
    stopped = trainer(CHANGES, tmp_path)
    stopped.add_callback(At(moment, step, presses()))
    with pytest.raises(KeyboardInterrupt, match=f"after step {saved}; .*/checkpoint-{saved}; "):
        stopped.train()
    assert "this step ends and is saved first" in capfd.readouterr().err
    assert_goes_on(tmp_path, straight, saved)


def test_by_ctrl_c_in_the_last_step_of_an_epoch(tmp_path):
    changes = {"max_steps": -1, "num_train_epochs": 2, "generation_batch_size": 8}
    changes |= {"save_strategy": "epoch", "eval_strategy": "epoch"}

    def run(folder: str, *callbacks: TrainerCallback, **resume):
        made = trainer(changes, tmp_path / folder)
        for callback in callbacks:
            made.add_callback(callback)
        made.train(**resume)
        return left(made)

    straight = run("straight")
    with pytest.raises(KeyboardInterrupt, match="after step 4; "):
        run("stopped", At("on_step_begin", 3, presses()))
    assert run("stopped", resume_from_checkpoint=True) == straight


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    made = trainer(CHANGES, tmp_path)
    made.add_callback(At("on_step_begin", 1, presses(times=2)))
    with pytest.raises(KeyboardInterrupt, match="after step 1; there is no checkpoint"):
        made.train()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_ones_own_stays(tmp_path):
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        made = trainer({"max_steps": 2}, tmp_path)
        made.add_callback(At("on_step_begin", 1, presses()))
        made.train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [True]
