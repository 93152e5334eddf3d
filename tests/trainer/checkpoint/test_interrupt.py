"""Ctrl-C: the step ends and is saved, and a resumed run is the straight run; twice: at once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from grpo_trainer.cli import main
from tests.support.trainer import logged, parameters
from tests.trainer import killed_runs

MOMENTS = ("on_train_begin", "on_step_begin", "on_substep_end", "on_log", "on_save", "on_epoch_end")


class Presses(TrainerCallback):
    """Presses Ctrl-C at one moment of a run, once or more often."""

    def __init__(self, moment: str, step: int, times: int = 1) -> None:
        self._at, self._left = (moment, step), times
        for name in MOMENTS:
            setattr(self, name, lambda args, state, *_, name=name, **__: self._see(name, state))

    def _see(self, name: str, state) -> None:
        while self._at == (name, state.global_step) and self._left:
            self._left -= 1
            signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    trainer = killed_runs.trainer(tmp_path_factory.mktemp("straight"))
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("moment", "step", "saved"),
    [
        ("on_train_begin", 0, 1),
        ("on_step_begin", 4, 5),
        ("on_log", 4, 4),
        ("on_save", 3, 3),
        ("on_step_begin", 7, 8),
    ],
)
def test_resumed_run_is_the_straight_run(tmp_path, straight, moment, step, saved, capfd):
    stopped = killed_runs.trainer(tmp_path)
    stopped.add_callback(Presses(moment, step))
    with pytest.raises(KeyboardInterrupt, match=f"after step {saved}; .*/checkpoint-{saved}; "):
        stopped.train()
    assert "this step ends and is saved first" in capfd.readouterr().err
    resumed = killed_runs.trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == logged(straight)
    assert torch.equal(parameters(resumed.model), parameters(straight.model))


def test_the_last_step_of_an_epoch(make_trainer, policy, dataset, tmp_path):
    settings = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch"}
    settings |= {"train_dataset": dataset.select(range(3))}
    settings |= {"eval_strategy": "epoch", "lr_scheduler_type": "constant"}
    weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}

    def run(folder: str, *callbacks: TrainerCallback, **resume):
        policy.load_state_dict(weights)
        trainer = make_trainer(
            output_dir=str(tmp_path / folder), callbacks=list(callbacks), **settings
        )
        if callbacks:
            with pytest.raises(KeyboardInterrupt, match="after step 3; "):
                trainer.train()
        else:
            trainer.train(**resume)
        return trainer

    straight = logged(run("straight"))
    run("stopped", Presses("on_step_begin", 2))
    assert logged(run("stopped", resume_from_checkpoint=True)) == straight


def test_a_second_one_ends_the_run_at_once(make_trainer, tmp_path):
    trainer = make_trainer(callbacks=[Presses("on_step_begin", 1, times=2)])
    with pytest.raises(KeyboardInterrupt, match="after step 1; there is no checkpoint"):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_ones_own_stays(make_trainer, monkeypatch):
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        make_trainer(callbacks=[Presses("on_step_begin", 1)]).train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [True]


REWARD = """
import signal

def reward(completion_ids, **kwargs):
    signal.raise_signal(signal.SIGINT)
    return [float(len(ids)) for ids in completion_ids]
"""


def test_on_the_command_line(tmp_path, monkeypatch, policy, tokenizer, dataset, capfd):
    monkeypatch.chdir(tmp_path)
    Path("pressing.py").write_text(REWARD)
    policy.save_pretrained("model")
    tokenizer.save_pretrained("model")
    dataset.to_json("rows.jsonl")
    argv = ["--model_name_or_path", "model", "--dataset_name", "rows.jsonl", "--output_dir", "out"]
    argv += ["--reward_funcs", "pressing.reward", "--num_generations", "4", "--max_steps", "3"]
    argv += ["--per_device_train_batch_size", "4", "--max_completion_length", "4", "--use_cpu"]
    with pytest.raises(SystemExit) as end:
        main(argv)
    lines = capfd.readouterr().err.splitlines()
    assert end.value.code == 130
    assert lines[-1] == (
        "grpo-train: stopped after step 1; newest checkpoint: out/checkpoint-1; "
        "--resume_from_checkpoint true, in Python train(resume_from_checkpoint=True), "
        "goes on from it"
    )
    monkeypatch.setattr(signal, "raise_signal", lambda number: None)
    main([*argv, "--resume_from_checkpoint", "true"])
    assert Path("out/model.safetensors").exists()
