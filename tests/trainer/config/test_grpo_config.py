from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import get_type_hints

import pytest
from accelerate.parallelism_config import ParallelismConfig
from transformers import HfArgumentParser, TrainingArguments

from grpo_kernels import Bounded, LossConfig
from grpo_kernels.losses import LOSSES
from grpo_trainer import GRPOConfig
from grpo_trainer.cli.train import parse
from grpo_trainer.config import backward_options, loss_config


def test_defaults(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    expected = {
        "learning_rate": 1e-6,
        "logging_steps": 10,
        "gradient_checkpointing": True,
        "bf16": False,
        "remove_unused_columns": False,
        "num_generations": 8,
        "max_completion_length": 512,
        "max_prompt_length": None,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "num_iterations": 1,
        "scale_rewards": "group",
        "steps_per_generation": 1,
        "generation_batch_size": 8,
    }
    assert {name: getattr(args, name) for name in expected} == expected


def test_every_loss_field_reaches_the_loss(make_args):
    args, own = make_args(), {"max_completion_length", "surrogate", "number"}
    surrogates = {loss.surrogate for loss in LOSSES.values()}
    for field in [item for one in (LossConfig, *surrogates) for item in dataclasses.fields(one)]:
        if field.name.startswith("rollout_correction_"):
            assert not hasattr(args, field.name)
        elif field.name not in own:
            assert getattr(args, field.name) == field.default
    changed = loss_config(make_args(loss_type="grpo", beta=0.1, epsilon_high=0.3, delta=4.0))
    assert (changed.loss_type, changed.beta) == ("grpo", 0.1)
    assert (changed.surrogate.epsilon_high, changed.surrogate.delta) == (0.3, 4.0)
    assert changed.max_completion_length == 4


@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_is_accepted(make_args, loss_type):
    args = make_args(loss_type=loss_type, epsilon_high=5.0 if loss_type == "cispo" else None)
    assert loss_config(args).loss_type == loss_type


def test_the_backward_of_the_head(make_args):
    assert backward_options(make_args()) == {"activation_bytes": None}
    words = "--backward_tolerance 2e-3 --no_backward_exact_weight --activation_bytes 4096 --seed 7"
    run = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "x", "--use_cpu"]
    _, args = parse([*run, *words.split()])
    bounded = Bounded(tolerance=2e-3, exact_weight=False, seed=7)
    assert backward_options(args) == {"backward": bounded, "activation_bytes": 4096}


def test_generation_batch(make_args):
    args = make_args(gradient_accumulation_steps=3)
    assert (args.generation_batch_size, args.steps_per_generation) == (12, 3)
    args = make_args(generation_batch_size=16)
    assert (args.generation_batch_size, args.steps_per_generation) == (16, 4)
    args = make_args(steps_per_generation=2)
    assert (args.generation_batch_size, args.steps_per_generation) == (8, 2)


@pytest.mark.parametrize(
    ("given", "kept"), [(True, "group"), (False, "none"), ("False", "none"), ("batch", "batch")]
)
def test_scale_rewards(make_args, given, kept):
    assert make_args(scale_rewards=given).scale_rewards == kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation_batch_size": 8, "steps_per_generation": 2}, "at most one"),
        ({"generation_batch_size": 6}, "multiple of 4"),
        ({"num_generations": 3}, r"divisor of the generation batch of 4 completions \(2, 4\)"),
        ({"num_generations": 1}, "num_generations: expected an integer >= 2"),
        ({"num_iterations": 0}, "num_iterations"),
        ({"max_prompt_length": 0}, "max_prompt_length"),
        ({"loss_type": "ppo"}, "dapo"),
        ({"scale_rewards": "max"}, "group, batch, none"),
        ({"multi_objective_aggregation": "mean"}, "sum_then_normalize"),
        ({"beta": -1.0}, "beta"),
        ({"temperature": 0.0}, "temperature"),
        (
            {"eval_strategy": "steps", "num_generations_eval": 3},
            "per_device_eval_batch_size: expected a size such as 3, 6, 9 that .* of 3 .*, got 4",
        ),
        ({"generation_kwargs": {"stop_strings": ["."]}}, "its 'stop_token_ids'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, "parallelism_config: expected None"),
        ({"num_generations": "4"}, "num_generations: expected an integer >= 2, got '4'"),
        ({"per_device_train_batch_size": 1}, r"\(none: enlarge the batch\)"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size: expected an integer >="),
        ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size: expected an integer >= 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: expected an integer >="),
        ({"learning_rate": -1.0}, "learning_rate: expected a number >= 0, got -1.0"),
        ({"learning_rate": 10**400}, "learning_rate: expected a number >= 0, got 1000"),
        ({"max_steps": -5}, "max_steps: expected at least 1, or -1 to go by num_train_epochs, got"),
        ({"max_steps": 0}, "max_steps: expected at least 1"),
        ({"num_train_epochs": -1.0}, "num_train_epochs: expected a number >= 0, got -1.0"),
        ({"loss_kwargs": {"beta": 0.1}}, "loss_kwargs: expected the loss's own .*, got 'beta'"),
        ({"loss_kwargs": {"loss_type": "grpo"}}, "loss_kwargs: .* got 'loss_type'"),
        ({"loss_kwargs": {"rollout_correction_max": 2.0}}, "got 'rollout_correction_max'"),
        ({"loss_kwargs": '{"a": ' + "[" * 9999}, "loss_kwargs: expected JSON"),
        ({"accelerator_config": {"batches": 1}}, "accelerator_config: expected one of split_batch"),
        ({"accelerator_config": {"dispatch_batches": True}}, "expected dispatch_batches=False"),
        ({"accelerator_config": {"split_batches": True}}, "expected split_batches=False"),
        ({"reward_weights": 1.0}, "reward_weights: expected a list of numbers, got 1.0"),
        ({"trust_remote_code": "False"}, "trust_remote_code: expected True or False, got 'False'"),
        ({"use_cpu": "no"}, "use_cpu: expected True or False, got 'no'"),
        ({"bf16": "false"}, "bf16: expected True or False or None, got 'false'"),
        ({"shuffle_dataset": None}, "shuffle_dataset: expected True or False, got None"),
        ({"log_completions_hub_repo": "me/logs"}, "expected log_completions with it"),
        (
            {"log_completions_hub_repo": "a/b/c", "log_completions": True},
            "log_completions_hub_repo: expected owner/name or name, got 'a/b/c'",
        ),
        ({"model_init_kwargs": {"dtype": "float33"}}, "expected auto or a floating-point dtype"),
        (
            {"model_init_kwargs": {"dtype": "float32", "torch_dtype": "bfloat16"}},
            "expected one of dtype and torch_dtype .* got 'float32' and 'bfloat16'",
        ),
        ({"top_p": 0.0}, "top_p: expected a number > 0 and <= 1, got 0.0"),
        ({"top_k": -1}, "top_k: expected an integer >= 0"),
        ({"min_p": 1.5}, "min_p: expected a number >= 0 and <= 1"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a number > 0"),
        ({"reward_weights": [1.0, float("nan")]}, "reward_weights"),
        ({"cache_implementation": "fast"}, "cache_implementation"),
        (
            {"backward_tolerance": 0.0},
            r"backward_tolerance: expected a number in \(0, 1\), got 0.0",
        ),
        ({"backward_tolerance": 1}, r"backward_tolerance: expected a number in \(0, 1\), got 1"),
        ({"backward_tolerance": "high"}, r"backward_tolerance: expected a number in .*'high'"),
        ({"backward_tolerance": 1e-2, "entropy_coef": 0.1}, "expected None with entropy_coef=0.1"),
        (
            {"backward_tolerance": 1e-2, "use_adaptive_entropy": True},
            "backward_tolerance: expected None with use_adaptive_entropy=True",
        ),
        (
            {"backward_tolerance": 1e-2, "use_sampling_mask": True, "top_k": 4},
            "backward_tolerance: expected None with use_sampling_mask=True",
        ),
        ({"backward_tolerance": 1e-2, "seed": 1 << 32}, "seed: expected an int in"),
        ({"backward_exact_weight": False}, "expected True without backward_tolerance"),
        ({"activation_bytes": -1}, "activation_bytes: expected an integer >= 0, got -1"),
        ({"activation_bytes": 1.5}, "activation_bytes: expected an integer >= 0, got 1.5"),
        ({"generation_kwargs": {"temperature": 0.5}}, "the field temperature instead"),
        ({"generation_kwargs": {"max_new_tokens": 5}}, "the field max_completion_length instead"),
        ({"generation_kwargs": {"num_beamz": 5}}, "GenerationConfig has no 'num_beamz'"),
        ({"generation_kwargs": "beams"}, "generation_kwargs: expected a dictionary"),
        ({"report_to": "wandbb"}, "report_to: expected one of .*wandb"),
        (
            {"report_to": ["swanlab"]},
            "report_to: expected trackers that are installed .*, got swanlab; pip install swanlab",
        ),
    ],
)
def test_wrong_values(make_args, changes, message):
    with pytest.raises(ValueError, match=message):
        make_args(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, "dapo sums over tokens"),
        ({"loss_type": "bnpo", "importance_sampling_level": "sequence_token"}, "bnpo sums over"),
        ({"loss_type": "dr_grpo", "importance_sampling_level": "sequence"}, "dr_grpo sums over"),
        ({"loss_type": "luspo", "importance_sampling_level": "token"}, "defined with 'sequence'"),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, None),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, None),
        ({"loss_type": "luspo"}, None),
    ],
)
def test_levels_that_a_loss_is_not_made_for(make_args, recwarn, changes, message):
    make_args(**changes)
    found = [str(item.message) for item in recwarn if "_level:" in str(item.message)]
    assert len(found) == (message is not None) and all(message in text for text in found)


def test_workers_read_no_training_prompts(make_args):
    with pytest.warns(UserWarning, match="dataloader_num_workers: no effect on training"):
        make_args(dataloader_num_workers=2)


def test_liger_leaves_the_head_to_us(make_args):
    args = make_args(use_liger_kernel=True, liger_kernel_config={"rope": False})
    assert args.liger_kernel_config == {
        "rope": False,
        "fused_linear_cross_entropy": False,
        "cross_entropy": False,
    }
    with pytest.raises(ValueError, match=r"liger_kernel_config\['fused_linear_cross_entropy'\]"):
        make_args(use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": True})


def test_old_names(make_args):
    with pytest.warns(FutureWarning, match="wandb_log_unique_prompts: Deprecated: use log_unique"):
        args = make_args(wandb_log_unique_prompts=True)
    assert args.log_unique_prompts and args == make_args(log_unique_prompts=True)
    with pytest.warns(FutureWarning, match="use_liger_loss: Deprecated: the loss is always fused"):
        assert make_args(use_liger_loss=True) == make_args()
    with pytest.warns(FutureWarning, match="use_transformers_paged: Deprecated"):
        assert make_args(use_transformers_paged=True).use_transformers_continuous_batching
    with pytest.warns(FutureWarning, match="top_k"):
        assert make_args(top_k=None).top_k == 0
    with (
        pytest.raises(ValueError, match="expected one of them"),
        pytest.warns(FutureWarning),
    ):
        make_args(wandb_log_unique_prompts=False, log_unique_prompts=True)


def test_the_bare_name_of_an_old_flag():
    run = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "x"]
    with pytest.warns(FutureWarning, match="use_liger_loss: Deprecated"):
        parse([*run, "--use_liger_loss", "--use_cpu"])
    with pytest.warns(FutureWarning, match="wandb_log_unique_prompts: Deprecated"):
        _, args = parse([*run, "--wandb_log_unique_prompts", "--use_cpu"])
    assert args.log_unique_prompts


def test_flags_of_transformers_own_parser():
    """Every flag of ours; transformers itself takes no bare flag for some of its own."""
    hints = get_type_hints(GRPOConfig)
    theirs = set(get_type_hints(TrainingArguments)) - {"bf16"}
    flags = [name for name in hints if hints[name] in (bool, bool | None) and name not in theirs]
    found = HfArgumentParser(GRPOConfig).parse_args([f"--{name}" for name in flags])
    assert "use_liger_loss" in flags and all(getattr(found, name) is True for name in flags)


def test_no_warning_without_old_names(make_args, recwarn):
    make_args()
    assert not [item for item in recwarn if "Deprecated" in str(item.message)]


@pytest.mark.parametrize(
    ("given", "found"),
    [("auto", None), (None, None), ("none", None), ("null", None), (8, 8), ("16", 16)],
)
def test_padding_is_a_number_or_none(make_args, given, found):
    assert make_args().pad_to_multiple_of is None
    assert make_args(pad_to_multiple_of=given).pad_to_multiple_of == found


@pytest.mark.parametrize("wrong", [0, -8, True, 1.5, "0", "-8", "far", ""])
def test_no_padding(make_args, wrong):
    with pytest.raises(ValueError, match="pad_to_multiple_of: expected an integer >= 1, auto or"):
        make_args(pad_to_multiple_of=wrong)


def test_defaults_in_the_documents():
    text = (Path(__file__).parents[3] / "docs" / "trainer.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| `(.+?)` \| `(.+?)`", text.split("| older documents |")[1], re.M
    )
    ours = {item.name: item.default for item in dataclasses.fields(GRPOConfig)}
    assert len(rows) > 5
    assert {name: ast.literal_eval(here) for name, _, here in rows} == {
        name: ours[name] for name, _, _ in rows
    }
    assert not [name for name, before, here in rows if before == here]


def test_values_of_trl():
    trl = pytest.importorskip("trl")
    ours = {item.name: item.default for item in dataclasses.fields(GRPOConfig)}
    theirs = {item.name: item.default for item in dataclasses.fields(trl.GRPOConfig)}
    on_purpose = {
        "importance_sampling_level",  # None: that of the named loss
        "logging_nan_inf_filter",  # True would wait for the device in every step
        "use_transformers_paged",  # None: not set
        "vllm_server_host",  # theirs is an address to bind to, not one to connect to
    }
    different = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert different - on_purpose == set()


def test_a_name_that_is_misspelled_in_python(tmp_path):
    said = r"GRPOConfig.__init__\(\) got an unexpected keyword argument 'epsilon_hgih' \(is it epsi"
    with pytest.raises(TypeError, match=said):
        GRPOConfig(output_dir=str(tmp_path), epsilon_hgih=0.3)
    assert "learning_rate" in inspect.signature(GRPOConfig).parameters


def test_a_subclass_has_arguments_of_its_own(tmp_path):
    class Own(GRPOConfig):
        def __init__(self, folder: str) -> None:
            super().__init__(output_dir=folder, use_cpu=True)

    assert Own(folder=str(tmp_path)).output_dir == str(tmp_path)
    with pytest.raises(TypeError, match=r"'foldr' \(is it folder\?\)"):
        Own(foldr=str(tmp_path))
