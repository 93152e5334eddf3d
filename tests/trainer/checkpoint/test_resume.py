"""A resumed run is the straight run to the bit, whatever it has switched on.

And which checkpoint it goes on from, what it must share with it, and what is written where.
"""

from __future__ import annotations

import errno
import fnmatch
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from grpo_trainer import GRPOConfig, base
from grpo_trainer.checkpoint import CheckpointError, StartError
from grpo_trainer.checkpoint import resuming as run_settings
from grpo_trainer.checkpoint.files import MANIFEST_NAME
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from tests.support import left_behind
from tests.support.trainer import logged, parameters
from tests.trainer.checkpoint.table import BEST, EVALUATED, FEATURES, SYNCED
from tests.trainer.features import SAVED, STEPS, alike, engine, hint, made, resumable
from tests.trainer.test_extensions import Replay

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore")  # peft's, on tied weights and switched adapters
@pytest.mark.parametrize("feature", FEATURES)
def test_resumed_run_is_the_straight_run(feature, tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"

    def run(folder: Path, **resume):
        trainer = resumable(made(FEATURES[feature]), folder)
        trainer.train(**resume)
        assert trainer.state.global_step == STEPS
        last = left_behind.checkpoint(folder / f"checkpoint-{STEPS}")
        written = left_behind.completions(folder, after=SAVED)
        return left_behind.rows(trainer.state.log_history), last, written

    logged, last, written = run(straight)
    shutil.copytree(straight / f"checkpoint-{SAVED}", resumed / f"checkpoint-{SAVED}")
    again = run(resumed, resume_from_checkpoint=True)
    assert again[0] == logged
    assert again[2] == written and written
    assert again[1] == last and "optimizer.pt" in last


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def make(out):
    def trainer(folder: Path = out, **changes: Any):
        settings = {"max_steps": 2, "save_steps": 1, "log_completions": False}
        return resumable(settings | changes, folder)

    return trainer


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Return the folder of a run of two steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("written")
    resumable({"max_steps": 2, "save_steps": 1, "log_completions": False}, folder).train()
    return folder


@pytest.fixture
def checkpoint(written, out) -> Path:
    shutil.copytree(written, out)
    return out / "checkpoint-2"


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def other(completions, **kwargs):
    return [0.0] * len(completions)


LORA = LoraConfig(r=2, target_modules=["q_proj"])
# a change of a run that was written with features' defaults -> what the error says of it
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_generations": 4}, "num_generations = 2, got 4"),
    ({"num_iterations": 2}, "num_iterations = 1, got 2"),
    ({"temperature": 0.5, "seed": 1}, "seed = 42, got 1; temperature = 1.0, got 0.5"),
    ({"reward_weights": [2.0]}, r"reward_weights = \[1.0\], got \[2.0\]"),
    ({"reward_funcs": other}, r"reward_funcs = \['noisy_reward'\], got \['other'\]"),
    ({"train_dataset": Dataset.from_list([{"prompt": "1="}] * 7)}, "rows of .* = 11, got 7"),
    ({"model": make_policy(make_tokenizer(), seed=0).bfloat16()}, "dtypes of .*32.*, got .*bf"),
    ({"peft_config": LORA}, "peft_config.* = None, got "),
    ({"dynamic_prompts_fn": hint}, "dynamic_prompts_fn = None, got '.*hint'"),
    ({"rollout_func": hint}, "rollout_func"),
    ({"prompts": Replay}, "prompts = .*, got '.*Replay'"),
    (engine(), "engine = 'transformers', got 'BackgroundEngine'"),
    *(({name: value}, f"{name} = ") for name, value in {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "beta": 0.1,
        "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2,
        "generation_kwargs": {"no_repeat_ngram_size": 2}, "max_prompt_length": 3,
        "max_completion_length": 3, "scale_rewards": "none", "loss_type": "grpo",
        "multi_objective_aggregation": "normalize_then_sum", "epsilon": 0.1, "epsilon_high": 0.3,
        "entropy_coef": 0.1, "learning_rate": 1e-3, "lr_scheduler_type": "cosine",
        "warmup_steps": 1, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9,
        "max_grad_norm": 0.5, "optim": "sgd", "vllm_importance_sampling_mode": "token_mask",
        "mask_truncated_completions": True, "use_adaptive_entropy": True, "bf16": True,
        "cast_lm_head_to_fp32": True, "dynamic_sampling": True, "shuffle_dataset": False,
    }.items()),
    ({"use_sampling_mask": True, "top_k": 3}, "use_sampling_mask = False"),
    (SYNCED, "sync_ref_model = False"),
]  # fmt: skip


def test_what_is_trained_otherwise_is_refused(make, checkpoint):
    before = files(checkpoint.parent)
    for changes, message in REFUSED:
        message = f"^resume_from_checkpoint: .*checkpoint-2 was written with .*{message}"
        with pytest.raises(ValueError, match=message):
            make(max_steps=3, **changes).train(resume_from_checkpoint=str(checkpoint))
    assert files(checkpoint.parent) == before
    names = {item.name for item in fields(GRPOConfig)}
    for pattern in run_settings._FREE:  # one that is misspelt would free nothing
        assert fnmatch.filter(names, pattern)


def test_a_part_that_is_gone_is_refused(make):
    changes = {
        "peft_config": LORA,
        "dynamic_prompts_fn": hint,
        "optimizer_cls_and_kwargs": (torch.optim.SGD, {}),
    }
    make(**changes).train()
    for gone in changes:
        left = {name: value for name, value in changes.items() if name != gone}
        with pytest.raises(ValueError, match=f"was written with {gone}.* = .*, got "):
            make(**left).train(resume_from_checkpoint=True)


def test_other_processes_are_refused(make, checkpoint, monkeypatch):
    trainer = make(max_steps=3)
    other = run_settings.settings_of(trainer) | {"number of processes": 77}
    monkeypatch.setattr(base, "settings_of", lambda _: other)
    with pytest.raises(ValueError, match="was written with number of processes = 1, got 77"):
        trainer.train(resume_from_checkpoint=True)


def test_what_may_change_changes(make, checkpoint, tmp_path):
    free = {"logging_steps": 2, "save_steps": 3, "log_completions": True, "run_name": "other"}
    free |= {"mlp_tile_tokens": 5}
    trainer = make(tmp_path / "other", max_steps=4, **free)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert [row["step"] for row in logged(trainer)] == [1, 2, 4]
    folders = (tmp_path / "other").glob("checkpoint-*")
    assert sorted(folder.name for folder in folders) == ["checkpoint-3", "checkpoint-4"]


def test_a_run_becomes_longer_unless_its_learning_rates_depend_on_it(make, checkpoint, tmp_path):
    longer = make(max_steps=3)
    longer.train(resume_from_checkpoint=True)
    straight = make(tmp_path / "straight", max_steps=3)
    straight.train()
    assert torch.equal(parameters(longer.model), parameters(straight.model))
    assert logged(longer) == logged(straight)
    share = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.5}  # of all steps
    for schedule in ({"lr_scheduler_type": "linear"}, share):
        folder = tmp_path / schedule["lr_scheduler_type"]
        make(folder, **schedule).train()
        with pytest.raises(ValueError, match=f"a run of 2 steps, got .* for 3: .*'{folder.name}'"):
            make(folder, **schedule, max_steps=3).train(resume_from_checkpoint=True)


def test_every_file_of_a_checkpoint_is_needed_as_it_was(make, checkpoint):
    trainer = make(max_steps=3)
    start = parameters(trainer.model)
    names = {path.name for path in checkpoint.iterdir()} - {"README.md"}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"} <= names

    def assert_refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            trainer.train(resume_from_checkpoint=str(checkpoint))

    for name in sorted(names):
        path = checkpoint / name
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for damage in (bytes(flipped), content[: len(content) // 2]):
            path.write_bytes(damage)
            # of the list itself the line that is damaged says which file is not what it names
            listed = "(is damaged: |has no )" if name == MANIFEST_NAME else f"{name} is damaged: "
            assert_refused(f"complete checkpoint, .*{listed}")
        path.unlink()
        assert_refused(f"checkpoint-2 has no {name}")
        path.write_bytes(content)
    assert torch.equal(parameters(trainer.model), start)  # it was found before it was loaded
    (checkpoint / "README.md").write_text("# Mine")  # which no run reads
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 3


def test_sha256sum_reads_the_list(checkpoint):
    command = ["sha256sum", "--check", "--strict", "--quiet", MANIFEST_NAME]
    subprocess.run(command, cwd=checkpoint, check=True)


def test_a_list_that_is_cut_off_is_refused(make, checkpoint):
    path = checkpoint / MANIFEST_NAME
    *lines, _ = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines))
    with pytest.raises(ValueError, match="checkpoint-2 has no grpo_settings.json"):
        make(max_steps=3).train(resume_from_checkpoint=checkpoint)


def test_an_older_checkpoint_is_only_taken_when_it_is_named(make, checkpoint):
    (checkpoint / "scheduler.pt").unlink()
    trainer = make()
    older = str(checkpoint.with_name("checkpoint-1"))
    with pytest.raises(ValueError, match=f"checkpoint-2 has no scheduler.pt; .*, pass '{older}'"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train(resume_from_checkpoint=older)
    assert [row["step"] for row in logged(trainer)] == [1, 2]


def test_no_checkpoint(make, out, tmp_path):
    with pytest.raises(ValueError, match="expected a folder, got 'nowhere'"):
        make().train(resume_from_checkpoint="nowhere")
    with pytest.raises(ValueError, match="expected a checkpoint in output_dir"):
        make().train(resume_from_checkpoint=True)
    trainer = make(max_steps=1, save_only_model=True)
    trainer.train()
    with pytest.raises(ValueError, match=r"has no grpo_settings.json \(save_only_model"):
        trainer.train(resume_from_checkpoint=True)


def test_a_finished_run_takes_no_step(make, out):
    def run(**resume):
        length = {"max_steps": -1, "num_train_epochs": 0.3}
        trainer = make(save_strategy="epoch", write_report=True, **length)
        return trainer, trainer.train(**resume)

    straight, _ = run()
    assert straight.state.global_step == straight.state.max_steps == 2
    before = files(out)
    resumed, output = run(resume_from_checkpoint=True)
    assert output.global_step == resumed.state.global_step == 2 and output.metrics == {}
    assert torch.equal(parameters(resumed.model), parameters(straight.model))
    assert files(out) == before


def test_the_best_checkpoint_and_those_of_others_stay(make, out):
    (out / "checkpoint-90").mkdir(parents=True)
    settings = EVALUATED | BEST | {"eval_steps": 1, "load_best_model_at_end": True}
    settings |= {"max_steps": 4, "save_total_limit": 2, "reward_funcs": alike}  # the first is best
    trainer = make(overwrite_output_dir=True, **settings)
    trainer.train()
    assert sorted(path.name[11:] for path in out.iterdir()) == ["1", "4", "90"]
    resumed = make(**settings)
    resumed.train(resume_from_checkpoint=out / "checkpoint-4")
    assert torch.equal(parameters(resumed.model), parameters(trainer.model))
    assert resumed.state.best_model_checkpoint == str(out / "checkpoint-1")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("failed writing file")]
)
def test_full_disk(make, out, monkeypatch, error):
    trainer = make(max_steps=3)
    save = torch.save

    def full(value, path, **kwargs):
        if trainer.state.global_step == 2 and "optimizer" in str(path):
            raise error
        save(value, path, **kwargs)

    message = f"checkpoint-2 could not .*: .*{error.args[-1]}.* MiB were free.*: checkpoint-1$"
    with monkeypatch.context() as patches:
        patches.setattr(torch, "save", full)
        with pytest.raises(CheckpointError, match=message):
            trainer.train()
    assert [path.name for path in out.iterdir()] == ["checkpoint-1"]
    resumed = make(max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


@pytest.mark.parametrize("left", ["checkpoint-2", "config.json"])
def test_what_another_run_has_left_stays(make, checkpoint, out, tmp_path, left):
    resumed = {}
    (checkpoint / "old").touch()
    if left == "config.json":
        out.rename(tmp_path / "elsewhere")
        make().model.save_pretrained(out)
        resumed["resume_from_checkpoint"] = tmp_path / "elsewhere" / "checkpoint-2"
    before = files(out)
    trainer = make(max_steps=3)
    with pytest.raises(StartError, match=f"^output_dir: .* with {left}; .* overwrite_output_dir"):
        trainer.train(**resumed)
    assert files(out) == before
    trainer.args.overwrite_output_dir = True
    trainer.train(**resumed)
    assert (out / "checkpoint-3").exists()
    assert not (out / "checkpoint-2" / "old").exists()  # the same step is written again


def test_a_trainer_may_train_again(make):
    """What it has saved itself is its own, and it starts with a generation batch of its own."""
    steps = []

    def reward(completions, trainer_state, **kwargs):
        steps.append(trainer_state.global_step)
        return [0.0] * len(completions)

    trainer = make(reward_funcs=reward, num_iterations=2, max_steps=3, save_strategy="no")
    trainer.save_model()
    for _ in range(2):
        trainer.train()
    assert steps == [0, 2, 0, 2]


def test_two_runs_do_not_share_a_folder(make, out):
    inner = make(max_steps=1, save_strategy="no")
    refused = []

    def reward(completions, **kwargs):
        with pytest.raises(ValueError, match="output_dir: expected .*, where process .* trains"):
            inner.train()
        refused.append(inner.state.global_step)
        return [0.0] * len(completions)

    outer = make(reward_funcs=reward, max_steps=1, save_strategy="no")
    for _ in range(2):  # one after the other they may
        outer.train()
    assert refused == [0, 0]
    inner.train()
    assert inner.state.global_step == 1
    assert not list(out.glob("*.lock"))


def test_a_folder_that_cannot_be_locked(make, monkeypatch, caplog):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    make(max_steps=1, save_strategy="no").train()
    assert "cannot be locked, so other runs could write to it" in caplog.text


def test_a_checkpoint_that_was_to_be_replaced_comes_back(make, checkpoint):
    aside = checkpoint.with_name("incomplete-checkpoint-2")
    aside.mkdir()
    checkpoint.rename(aside / "replaced")
    trainer = make(max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert [row["step"] for row in logged(trainer)] == [1, 2, 3]
