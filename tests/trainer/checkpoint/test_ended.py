"""A run that is ended, anywhere and by anything, and resumed is the straight run to the bit.

A saved model is the old one or the new one, never a mixture, whenever the saving ends.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from grpo_trainer.checkpoint import CheckpointError, files
from tests.chaos import ROOT
from tests.support import left_behind
from tests.support.trainer import parameters, rows_reward
from tests.trainer.checkpoint.table import SYNCED
from tests.trainer.features import resumable

pytestmark = pytest.mark.slow

# steps 3 and 6 are in the middle of a generation batch, of a window of logs, and are saved
CHANGES = SYNCED | {
    "steps_per_generation": 2, "dynamic_sampling": True, "use_adaptive_entropy": True,
    "entropy_target": 5.0, "logging_steps": 2, "max_steps": 8, "save_steps": 3,
    "save_total_limit": 1,
}  # fmt: skip


def test_at_random_moments(tmp_path):
    command = [sys.executable, "-m", "tests.chaos", "--kills", "3", "--seed", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def watched(look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` before each change of a folder's entries, and at the end."""
    with pytest.MonkeyPatch.context() as patches:
        for name in ("mkdir", "rename", "replace", "rmdir", "unlink"):
            patches.setattr(os, name, partial(_look_and_change, look, getattr(os, name)))
        yield
    look()


def _look_and_change(look: Callable[[], None], change: Callable[..., None], *args, **kwargs):
    look()
    change(*args, **kwargs)


def left(made) -> list:
    """Return what a run that is through has left."""
    out = Path(made.args.output_dir)
    names = sorted(path.name for path in out.iterdir())
    last = out / f"checkpoint-{made.state.max_steps}"
    logged = left_behind.rows(made.state.log_history)
    return [names, left_behind.checkpoint(last), left_behind.completions(out), logged]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[list, Path]:
    """Return what a run leaves, and its folder as it once was, with an unfinished checkpoint.

    Whenever it is killed, the newest checkpoint is whole, and none is older than before.
    """
    out, unfinished = (tmp_path_factory.mktemp(name) for name in ("straight", "unfinished"))
    newest, copied = [], []

    def look() -> None:
        steps = [int(folder.name[11:]) for folder in files.checkpoints(out)]
        for folder in files.checkpoints(out):
            checksums = files.read_manifest(folder)
            assert files.SETTINGS_FILE in checksums
            files.check_contents(folder, checksums)
        newest.append(max(steps, default=0))
        writing = out / "incomplete-checkpoint-6" / "checkpoint-6" / "rng_state.pth"
        if writing.exists() and not copied:
            copied.append(True)
            shutil.copytree(out, unfinished, dirs_exist_ok=True)

    made = resumable(CHANGES, out)
    with watched(look):
        made.train()
    assert newest == sorted(newest) and set(newest) == {0, 3, 6, 8}
    return left(made), unfinished


def assert_goes_on(folder: Path, expected: list, newest: int) -> None:
    assert files.checkpoints(folder)[-1].name == f"checkpoint-{newest}"
    resumed = resumable(CHANGES, folder)
    resumed.train(resume_from_checkpoint=True)
    assert left(resumed) == expected


def test_while_a_checkpoint_is_written(straight, caplog):
    expected, unfinished = straight
    assert_goes_on(unfinished, expected, newest=3)
    assert "incomplete-checkpoint-6, an unfinished checkpoint" in caplog.text


class At(TrainerCallback):
    """Does something at one moment of a run, once."""

    def __init__(self, moment: str, step: int, action) -> None:
        def see(args, state, control, **kwargs):
            if state.global_step == step and left:
                left.pop()
                action()

        left = [True]
        setattr(self, moment, see)


def presses(times: int = 1):
    return lambda: [signal.raise_signal(signal.SIGINT) for _ in range(times)]


@pytest.mark.parametrize(
    ("moment", "step", "saved"),
    [("on_train_begin", 0, 1), ("on_save", 3, 3), ("on_step_begin", 7, 8)],
)
def test_by_ctrl_c(tmp_path, straight, moment, step, saved, capfd):
    stopped = resumable(CHANGES, tmp_path)
    stopped.add_callback(At(moment, step, presses()))
    with pytest.raises(KeyboardInterrupt, match=f"after step {saved}; .*/checkpoint-{saved}; "):
        stopped.train()
    assert "finishing and saving this step" in capfd.readouterr().err
    assert_goes_on(tmp_path, straight[0], saved)


def test_by_ctrl_c_in_the_last_step_of_an_epoch(tmp_path):
    changes = {"max_steps": -1, "num_train_epochs": 2, "generation_batch_size": 8}
    changes |= {"save_strategy": "epoch", "eval_strategy": "epoch"}

    def run(folder: str, *callbacks: TrainerCallback, **resume):
        made = resumable(changes, tmp_path / folder)
        for callback in callbacks:
            made.add_callback(callback)
        made.train(**resume)
        return left(made)

    straight = run("straight")
    with pytest.raises(KeyboardInterrupt, match="after step 4; "):
        run("stopped", At("on_step_begin", 3, presses()))
    assert run("stopped", resume_from_checkpoint=True) == straight


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    made = resumable(CHANGES, tmp_path)
    made.add_callback(At("on_step_begin", 1, presses(times=2)))
    with pytest.raises(KeyboardInterrupt, match="after step 1; there is no checkpoint"):
        made.train()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_ones_own_stays(tmp_path):
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        made = resumable({"max_steps": 2}, tmp_path)
        made.add_callback(At("on_step_begin", 1, presses()))
        made.train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [True]


# a saved model is the old one or the new one


def texts(folder: Path) -> dict[str, str]:
    """Return the contents by name, without what is still aside."""
    return {
        path.name: path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent == folder
    }


def write(folder: Path, names: list[str], content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(content)


ONE = ["model.safetensors"]
TWO = [
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
]  # fmt: skip
REST = ["config.json", "tokenizer.json"]


@pytest.mark.parametrize("old", [ONE, TWO])
@pytest.mark.parametrize("new", [ONE, TWO])
def test_no_mixture_is_ever_a_model(tmp_path, old, new):
    folder = tmp_path / "model"
    write(folder, [*old, *REST], "old")
    write(folder, ["model_card.safetensors", "README.md"], "mine")
    seen = []

    with watched(lambda: seen.append(texts(folder))), files.model_aside(folder) as aside:
        assert (aside / "README.md").read_text() == "mine"
        write(aside, [*REST, *new], "new")
    seen.append(texts(folder))
    for content in seen:
        model = {name: text for name, text in content.items() if text != "mine"}
        if "config.json" in model:
            assert model in (
                dict.fromkeys((*old, *REST), "old"),
                dict.fromkeys((*new, *REST), "new"),
            )
    names = {*new, *REST, "README.md", "model_card.safetensors"}
    assert {path.name for path in folder.iterdir()} == names


class _Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "raised"),
    [(_Killed(), _Killed), (OSError(errno.ENOSPC, "No space left"), CheckpointError)],
)
def test_a_save_that_does_not_end_leaves_the_old_model(make_trainer, monkeypatch, error, raised):
    def full(*args, **kwargs):
        raise error

    trainer = make_trainer(rows_reward, max_steps=1)
    folder = Path(trainer.args.output_dir)
    trainer.save_model()
    before = parameters(trainer.model)
    trainer.train()
    with monkeypatch.context() as patches:
        patches.setattr(torch, "save", full)  # the last file, when the weights are written
        with pytest.raises(raised):
            trainer.save_model()
    assert torch.equal(parameters(AutoModelForCausalLM.from_pretrained(folder)), before)
    # it would fill the disk
    assert (folder / "incomplete-model").exists() == (raised is _Killed)
    trainer.save_model()
    after = parameters(AutoModelForCausalLM.from_pretrained(folder))
    assert torch.equal(after, parameters(trainer.model)) and not torch.equal(after, before)
    assert not (folder / "incomplete-model").exists()
