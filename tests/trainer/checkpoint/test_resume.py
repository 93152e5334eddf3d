from __future__ import annotations

import copy
import errno
import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.checkpoint import CheckpointError, StartError, run_settings, settings_of
from grpo_trainer.checkpoint.resuming import check_checkpoint
from tests.support.trainer import logged, parameters

pytestmark = pytest.mark.slow

SAVING = {"save_strategy": "steps", "lr_scheduler_type": "constant"}


@pytest.mark.parametrize(
    "changes",
    [
        # step 4 is in the middle of a generation, and of a window of logs
        {"num_iterations": 3, "logging_steps": 3, "log_completions": True},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "beta": 0.1},
        {"generation_batch_size": 48},  # epochs of 24 steps, half a dataset
        {"generation_batch_size": 48, "num_train_epochs": 7 / 24, "max_steps": -1},
        {"dynamic_sampling": True, "max_resampling_rounds": 3, "logging_steps": 3},
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3},
        {"eval_strategy": "steps", "eval_steps": 2, "optim": "adamw_torch", "weight_decay": 0.1},
    ],
)
def test_resumed_run_is_the_straight_run(make_trainer, policy, tmp_path, changes):
    def run(resume: str | None = None) -> tuple[list, torch.Tensor]:
        settings = {"max_steps": 7, "save_steps": 4} | SAVING | changes
        trainer = make_trainer(model=copy.deepcopy(policy), **settings)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == 7
        return logged(trainer), parameters(trainer.model)

    straight = run()
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(tmp_path / "out" / "checkpoint-4", checkpoint)
    shutil.rmtree(tmp_path / "out")
    logs, parameters_ = run(str(checkpoint))
    assert logs == straight[0]
    assert torch.equal(parameters_, straight[1])


@pytest.mark.parametrize("streaming", [False, True])
def test_prompts_of_a_later_epoch(make_args, policy, tokenizer, dataset, tmp_path, streaming):
    def prompts(resume: str | None = None) -> list[str]:
        seen = []

        def reward(prompts, **kwargs):
            seen.append(prompts[0])
            return [0.0] * len(prompts)

        args = make_args(max_steps=9, save_steps=7, **SAVING)
        rows = dataset.select(range(6))
        if streaming:
            rows = rows.to_iterable_dataset().shuffle(7, buffer_size=6)
        model = copy.deepcopy(policy)
        trainer = GRPOTrainer(model, reward, args, rows, processing_class=tokenizer)
        trainer.train(resume_from_checkpoint=resume)
        return seen

    straight = prompts()  # 6 prompts an epoch
    assert sorted(straight[:6]) == sorted(dataset["prompt"][:6])
    assert straight[:3] != straight[6:]
    assert prompts(str(tmp_path / "out" / "checkpoint-7")) == straight[7:]


@pytest.fixture
def checkpoint(make_trainer, policy, tmp_path):
    make_trainer(model=copy.deepcopy(policy), max_steps=2, save_steps=1, **SAVING).train()
    return tmp_path / "out" / "checkpoint-2"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_generations": 2}, "num_generations = 4, got 2"),
        ({"num_iterations": 2}, "num_iterations = 1, got 2"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps = 1, got 2"),
        ({"per_device_train_batch_size": 8}, "per_device_train_batch_size = 4, got 8"),
        ({"temperature": 0.5, "seed": 1}, "seed = 42, got 1; temperature = 1.0, got 0.5"),
        ({"beta": 0.1}, "beta = 0.0, got 0.1"),
        ({"reward_weights": [2.0]}, r"reward_weights = \[1.0\], got \[2.0\]"),
    ],
)
def test_checkpoint_of_another_config(make_trainer, checkpoint, changes, field):
    trainer = make_trainer(max_steps=3, **SAVING, **changes)
    with pytest.raises(ValueError, match=f"resume_from_checkpoint: .*checkpoint-2 .*with {field}"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


CHANGED = [
    {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.2},
    {"generation_kwargs": {"no_repeat_ngram_size": 2}}, {"max_prompt_length": 3},
    {"max_completion_length": 3}, {"scale_rewards": "none"},
    {"multi_objective_aggregation": "normalize_then_sum"}, {"loss_type": "grpo"},
    {"epsilon": 0.1}, {"epsilon_high": 0.3}, {"entropy_coef": 0.1}, {"learning_rate": 1e-3},
    {"lr_scheduler_type": "cosine"}, {"warmup_steps": 1}, {"weight_decay": 0.1},
    {"adam_beta1": 0.8}, {"adam_beta2": 0.9}, {"max_grad_norm": 0.5}, {"optim": "sgd"},
    {"vllm_importance_sampling_mode": "token_mask"}, {"use_sampling_mask": True, "top_k": 3},
    {"mask_truncated_completions": True}, {"use_adaptive_entropy": True}, {"fp16": True},
    {"cast_lm_head_to_fp32": True}, {"dynamic_sampling": True}, {"shuffle_dataset": False},
]  # fmt: skip


def test_every_setting_of_what_is_trained_is_compared(make_trainer, make_args, checkpoint):
    trainer = make_trainer()
    for changes in CHANGED:
        trainer.args = make_args(**SAVING | changes)
        with pytest.raises(ValueError, match=f"written with .*{next(iter(changes))} = "):
            check_checkpoint(checkpoint, trainer.args, settings_of(trainer), steps=3)
    names = {item.name for item in fields(GRPOConfig)}
    assert names >= run_settings._FREE  # a name that is misspelt would free nothing


def test_other_parts_are_named(make_trainer, checkpoint):
    def other(completions, **kwargs):
        return [0.0] * len(completions)

    expected = r"reward_funcs = \['digits_reversal_reward'\], got \['other'\]"
    with pytest.raises(ValueError, match=expected):
        make_trainer(other, max_steps=3, **SAVING).train(resume_from_checkpoint=checkpoint)
    trainer = make_trainer(max_steps=3, **SAVING)
    trainer.model.bfloat16()
    with pytest.raises(ValueError, match="dtypes of the model = .*float32.*, got .*bfloat16"):
        trainer.train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_run_becomes_longer_unless_its_learning_rates_depend_on_it(
    make_trainer, policy, schedule
):
    settings = {"save_strategy": "steps", "lr_scheduler_type": schedule}
    make_trainer(model=copy.deepcopy(policy), max_steps=2, **settings).train()
    longer = make_trainer(model=copy.deepcopy(policy), max_steps=3, **settings)
    if schedule == "linear":
        with pytest.raises(ValueError, match="a run of 2 steps, got .* for 3: .*'linear'"):
            longer.train(resume_from_checkpoint=True)
        return
    longer.train(resume_from_checkpoint=True)
    settings["overwrite_output_dir"] = True
    straight = make_trainer(model=copy.deepcopy(policy), max_steps=3, **settings)
    straight.train()
    assert torch.equal(parameters(longer.model), parameters(straight.model))
    assert logged(longer) == logged(straight)


def test_checkpoint_of_other_processes_and_prompts(make_trainer, checkpoint):
    trainer = make_trainer(**SAVING)
    for name in ("number of processes", "rows of train_dataset"):
        with pytest.raises(ValueError, match=f"was written with {name} = .*, got 77"):
            check_checkpoint(checkpoint, trainer.args, settings_of(trainer) | {name: 77}, steps=3)


def test_what_may_change_changes(make_trainer, policy, checkpoint):
    free = {"output_dir": str(checkpoint.parent / "other"), "logging_steps": 2, "save_steps": 3}
    free |= {"log_completions": True, "num_completions_to_print": 0, "run_name": "other"}
    trainer = make_trainer(model=policy, max_steps=4, **SAVING | free)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert [row["step"] for row in logged(trainer)] == [1, 2, 4]
    folders = (checkpoint.parent / "other").glob("checkpoint-*")
    assert sorted(folder.name for folder in folders) == ["checkpoint-3", "checkpoint-4"]


def test_every_file_of_a_checkpoint_is_needed_as_it_was(make_trainer, checkpoint):
    trainer = make_trainer(max_steps=3, **SAVING)
    start = parameters(trainer.model)
    names = {path.name for path in checkpoint.iterdir()} - {"README.md"}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"} <= names
    for name in sorted(names):
        path = checkpoint / name
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for damage in (bytes(flipped), content[: len(content) // 2]):
            path.write_bytes(damage)
            with pytest.raises(ValueError, match=f"whole checkpoint, .*{name} is damaged: "):
                trainer.train(resume_from_checkpoint=str(checkpoint))
        path.unlink()
        with pytest.raises(ValueError, match=f"checkpoint-2 has no {name}"):
            trainer.train(resume_from_checkpoint=str(checkpoint))
        path.write_bytes(content)
    assert torch.equal(parameters(trainer.model), start)  # it was found before it was loaded
    (checkpoint / "README.md").write_text("# Mine")  # which no run reads
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 3


def test_an_older_checkpoint_is_only_taken_when_it_is_named(make_trainer, checkpoint, caplog):
    (checkpoint / "scheduler.pt").unlink()
    (checkpoint.parent / "incomplete-checkpoint-9").mkdir()
    trainer = make_trainer(max_steps=2, **SAVING)
    older = str(checkpoint.with_name("checkpoint-1"))
    with pytest.raises(ValueError, match=f"checkpoint-2 has no scheduler.pt; .*, pass '{older}'"):
        trainer.train(resume_from_checkpoint=True)
    assert "incomplete-checkpoint-9 is an unfinished checkpoint and is ignored" in caplog.text
    trainer.train(resume_from_checkpoint=older)
    assert [row["step"] for row in logged(trainer)] == [1, 2]


def test_models_alone_are_no_checkpoints(make_trainer):
    trainer = make_trainer(max_steps=1, save_only_model=True, **SAVING)
    trainer.train()
    with pytest.raises(ValueError, match=r"has no grpo_settings.json \(save_only_model"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("length", [{"max_steps": 2}, {"max_steps": -1, "num_train_epochs": 0.08}])
def test_a_finished_run_takes_no_step(make_trainer, policy, tmp_path, length):
    def run(**resume):
        trainer = make_trainer(
            model=copy.deepcopy(policy), save_strategy="epoch", write_report=True, **length
        )
        return trainer, trainer.train(**resume)

    straight, _ = run()
    assert straight.state.global_step == straight.state.max_steps == 2
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    resumed, output = run(resume_from_checkpoint=True)
    assert output.global_step == resumed.state.global_step == 2 and output.metrics == {}
    assert torch.equal(parameters(resumed.model), parameters(straight.model))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_finished_run_ends_with_its_best_model(make_trainer, policy):
    rewards = iter([1.0] * 100)
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 2}
    settings |= {"metric_for_best_model": "eval_reward", "load_best_model_at_end": True} | SAVING

    def run(**resume):
        model = copy.deepcopy(policy)

        def reward(completions, **kwargs):  # the first is the best
            return [next(rewards) + i for i in range(len(completions))]

        trainer = make_trainer(reward, model=model, greater_is_better=True, **settings)
        trainer.train(**resume)
        return parameters(trainer.model)

    assert torch.equal(run(), run(resume_from_checkpoint=True))


def test_no_checkpoint(make_trainer, checkpoint):
    with pytest.raises(ValueError, match="expected a folder, got 'nowhere'"):
        make_trainer().train(resume_from_checkpoint="nowhere")
    for folder in checkpoint.parent.iterdir():
        shutil.rmtree(folder)
    with pytest.raises(ValueError, match="expected a checkpoint in output_dir"):
        make_trainer().train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("failed writing file")]
)
def test_full_disk(make_trainer, policy, tmp_path, monkeypatch, error):
    trainer = make_trainer(model=copy.deepcopy(policy), max_steps=3, save_steps=1, **SAVING)
    save = torch.save

    def full(value, path, **kwargs):
        if trainer.state.global_step == 2 and "optimizer" in str(path):
            raise error
        save(value, path, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    message = f"checkpoint-2 could not .*: .*{error.args[-1]}.* MiB were free.*: checkpoint-1$"
    with pytest.raises(CheckpointError, match=message):
        trainer.train()
    out = tmp_path / "out"
    assert [path.name for path in out.iterdir()] == ["checkpoint-1"]
    monkeypatch.undo()
    resumed = make_trainer(model=copy.deepcopy(policy), max_steps=3, **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


def test_save_total_limit_counts_complete_checkpoints(make_trainer, policy, tmp_path):
    out = tmp_path / "out"
    broken = out / "checkpoint-90"
    broken.mkdir(parents=True)
    settings = {"max_steps": 3, "save_steps": 1, "save_total_limit": 1} | SAVING
    settings["overwrite_output_dir"] = True
    make_trainer(model=copy.deepcopy(policy), **settings).train()
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-3", "checkpoint-90"]


def test_best_checkpoint_stays(make_trainer, tmp_path):
    trainer = make_trainer(
        lambda completions, **kwargs: [1.0] * len(completions),
        max_steps=3,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_total_limit=2,
        metric_for_best_model="eval_reward",  # the first is the best
        greater_is_better=True,
        load_best_model_at_end=True,
        **SAVING,
    )
    trainer.train()
    best = tmp_path / "out" / "checkpoint-1"
    assert trainer.state.best_model_checkpoint == str(best)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"checkpoint-1", "checkpoint-3"}
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)


def test_same_checkpoint_written_again(make_trainer, policy, checkpoint):
    before = torch.load(checkpoint / "optimizer.pt")
    again = {"max_steps": 2, "save_steps": 1, "seed": 7, "overwrite_output_dir": True} | SAVING
    make_trainer(model=copy.deepcopy(policy), **again).train()
    assert get_last_checkpoint(checkpoint.parent) == str(checkpoint)
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == [
        "checkpoint-1", "checkpoint-2",
    ]  # fmt: skip
    after = torch.load(checkpoint / "optimizer.pt")
    assert not torch.equal(before["state"][0]["exp_avg"], after["state"][0]["exp_avg"])


@pytest.mark.parametrize("left", ["checkpoint-2", "config.json"])
def test_what_another_run_has_left_stays(make_trainer, policy, checkpoint, tmp_path, left):
    out, resumed = tmp_path / "out", {}
    if left == "config.json":
        out.rename(tmp_path / "elsewhere")
        policy.save_pretrained(out)
        resumed["resume_from_checkpoint"] = tmp_path / "elsewhere" / "checkpoint-2"
    before = sorted(out.rglob("*"))
    trainer = make_trainer(max_steps=3, **SAVING)
    with pytest.raises(StartError, match=f"^output_dir: .* with {left}; .* overwrite_output_dir"):
        trainer.train(**resumed)
    assert sorted(out.rglob("*")) == before
    trainer.args.overwrite_output_dir = True
    trainer.train(**resumed)
    assert (out / "checkpoint-3").exists()


def test_what_a_trainer_has_saved_itself_is_its_own(make_trainer):
    trainer = make_trainer(max_steps=1, **SAVING)
    trainer.save_model()
    trainer.train()
    trainer.train()


def test_train_twice_starts_again(make_trainer):
    trainer = make_trainer(num_iterations=2, max_steps=3)
    trainer.train()
    trainer.train()
    assert trainer._slices.position == 3


def test_two_runs_do_not_share_a_folder(make_trainer, policy):
    inner = make_trainer(model=copy.deepcopy(policy), max_steps=1)
    refused = []

    def reward(completions, **kwargs):
        with pytest.raises(ValueError, match="output_dir: expected .*, where process .* trains"):
            inner.train()
        refused.append(inner.state.global_step)
        return [0.0] * len(completions)

    outer = make_trainer(reward, max_steps=1)
    for _ in range(2):  # one after the other they may
        outer.train()
    assert refused == [0, 0]
    inner.train()
    assert inner.state.global_step == 1
    assert not list(Path(inner.args.output_dir).glob("*.lock"))


def test_a_folder_that_cannot_be_locked(make_trainer, monkeypatch, caplog):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    trainer = make_trainer(max_steps=1)
    monkeypatch.setattr("fcntl.flock", no_locks)
    trainer.train()
    assert "cannot be locked, so nothing keeps other runs out" in caplog.text
    assert trainer.state.global_step == 1
