"""Python, the command line and a YAML file configure the same run."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from grpo_trainer import GRPOConfig
from grpo_trainer.cli.train import parse
from grpo_trainer.config.old_names import OldNames

RUN = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["think_format_reward"]}
# what makes the values below possible together
BASE = {"use_cpu": True, "per_device_train_batch_size": 24, "per_device_eval_batch_size": 24}


def own_fields() -> dict[str, Any]:
    """Return the defaults of the fields that GRPOConfig adds or whose default it changes."""
    inherited = {item.name: item.default for item in dataclasses.fields(TrainingArguments)}
    old = {item.name for item in dataclasses.fields(OldNames)}
    return {
        item.name: item.default
        for item in dataclasses.fields(GRPOConfig)
        if item.name not in old and inherited.get(item.name, own_fields) != item.default
    }


# a value other than the default for each of them
VALUES: dict[str, Any] = {
    **{name: not default for name, default in own_fields().items() if isinstance(default, bool)},
    "learning_rate": 1e-5,
    "logging_steps": 3,
    "bf16": False,
    "model_init_kwargs": {"dtype": "bfloat16", "attn": {"a": 1e-6}},
    "allow_remote_images": True,
    "allowed_media_path": "images",
    "on_bad_image": "skip",
    "num_generations": 4,
    "num_generations_eval": 3,
    "max_prompt_length": 100,
    "max_completion_length": 7,
    "pad_to_multiple_of": 8,
    "generation_batch_size": 48,
    "steps_per_generation": 2,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "generation_kwargs": {"num_beams": 2, "length_penalty": 1e-6, "bad_words_ids": [[1], [2]]},
    "chat_template_kwargs": {"enable_thinking": False, "level": "007"},
    "cache_implementation": "static",
    "num_iterations": 2,
    "reward_weights": [1, -0.5, 2e-1],
    "scale_rewards": False,
    "multi_objective_aggregation": "normalize_then_sum",
    "max_resampling_rounds": 5,
    "max_tool_calling_iterations": 3,
    "tool_timeout": 2.5,
    "dynamic_prompts_fn": "package.module.function",
    "dynamic_prompts_form": "groups",
    "num_completions_to_print": 0,
    "log_completions_hub_repo": "owner/logs",
    "loss_type": "grpo",
    "loss_kwargs": {"epsilon": 0.3},
    "backward_tolerance": 2e-3,
    "activation_bytes": 4096,
    "beta": 0.04,
    "epsilon": 1e-1,
    "epsilon_high": 0.28,
    "delta": 4.0,
    "dual_clip": 3.0,
    "importance_sampling_level": "sequence",
    "temperature": 0.7,
    "kl_estimator": "k1",
    "sapo_temperature_pos": 2.0,
    "sapo_temperature_neg": 2.05,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.5,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.5,
    "gmpo_clip": 0.3,
    "entropy_coef": 1e-3,
    "entropy_coef_min": 0.05,
    "entropy_coef_max": 0.5,
    "entropy_coef_delta": 0.01,
    "entropy_target": 0.5,
    "top_entropy_quantile": 0.2,
    "off_policy_mask_threshold": 0.5,
    "router_aux_loss_coef": 0.01,
    "ref_model_mixup_alpha": 0.5,
    "ref_model_sync_steps": 64,
    "rollout_engine": "transformers",
    "transformers_continuous_batching_config": {"num_blocks": 64},
    "vllm_mode": "server",
    "vllm_model_impl": "transformers",
    "vllm_structured_outputs_regex": "[0-9]{3}",
    "vllm_server_base_url": "http://10.0.0.1:9000",
    "vllm_server_host": "10.0.0.1",
    "vllm_server_port": 9000,
    "vllm_server_timeout": 10.0,
    "vllm_request_timeout": 60.0,
    "vllm_group_port": 51000,
    "vllm_weight_transfer": "file",
    "vllm_weights_folder": "shared/weights",
    "vllm_gpu_memory_utilization": 0.5,
    "vllm_max_model_length": 4096,
    "vllm_tensor_parallel_size": 2,
    "vllm_engine_kwargs": {"enforce_eager": True, "max_num_seqs": 16},
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": 0.5,
}
_SURROGATES = ("sapo_", "vespo_", "gmpo_")
NEEDS = {
    **{name: {"loss_type": name.split("_")[0]} for name in VALUES if name.startswith(_SURROGATES)},
    "dynamic_prompts_form": {"dynamic_prompts_fn": "package.module.function"},
    "log_completions_hub_repo": {"log_completions": True},
    "sync_ref_model": {"beta": 0.1},
    "use_adaptive_entropy": {"entropy_coef": 0.1},
    "backward_exact_weight": {"backward_tolerance": 2e-3},
    "use_sampling_mask": {"top_k": 20},
    "transformers_continuous_batching_config": {"use_transformers_continuous_batching": True},
}


def write(values: dict[str, Any]) -> str:
    Path("run.yaml").write_text(yaml.safe_dump(RUN | values))
    return "run.yaml"


def words(values: dict[str, Any]) -> list[str]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += [f"--{name}", json.dumps(value)]
        else:
            listed = value if isinstance(value, list) else [value]
            found += [f"--{name}", *map(str, listed)]
    return found


def canonical(args: GRPOConfig) -> dict[str, Any]:
    return {item.name: getattr(args, item.name) for item in dataclasses.fields(args)}


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(VALUES["allowed_media_path"]).mkdir()


def three_ways(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        canonical(GRPOConfig(**values)),
        canonical(parse(words(RUN | values))[1]),
        canonical(parse(["--config", write(values)])[1]),
    ]


@pytest.mark.parametrize("name", own_fields())
def test_every_field_is_the_same_three_ways(name):
    values = BASE | NEEDS.get(name, {}) | {name: VALUES[name]}
    python, command, file = three_ways(values)
    assert command == python
    assert file == python
    default = GRPOConfig.__dataclass_fields__[name].default
    assert python[name] != default or name == "bf16"


def test_no_value_is_left_over():
    assert VALUES.keys() == set(own_fields())


def test_inherited_fields_are_the_same_three_ways():
    values = BASE | {
        "output_dir": "out",
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "optim": "adamw_torch",
        "weight_decay": 1e-2,
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "eval_strategy": "no",
        "accelerator_config": {"split_batches": False, "even_batches": True},
        "seed": 7,
        "run_name": "no",
    }
    python, command, file = three_ways(values)
    python["accelerator_config"] = python["accelerator_config"].to_dict()
    for other in (command, file):
        assert other | {"accelerator_config": other["accelerator_config"].to_dict()} == python
    assert python["run_name"] == "no"


def test_a_whole_config_survives_the_file():
    args = GRPOConfig(**BASE, num_generations=4, beta=0.1, report_to=["none"])
    values = {name: value for name, value in args.to_dict().items() if value is not None}
    set_by_the_other = ("generation_batch_size", "accelerator_config")
    for name in set_by_the_other:
        values.pop(name)
    again = parse(["--config", write(values)])[1]
    assert again.to_dict() == args.to_dict()


def test_words_stay_words_and_numbers_numbers():
    Path("run.yaml").write_text(
        "model_name_or_path: m\ndataset_name: d\nreward_funcs: think_format_reward\n"
        "use_cpu: yes\nsave_strategy: no\nlearning_rate: 1e-5\nmax_prompt_length: null\n"
        "vllm_importance_sampling_clip_max: null\n"
        "generation_kwargs: {length_penalty: 1e-5}\nreport_to: [none]\n"
    )
    run, args = parse(["--config", "run.yaml"])
    assert run.reward_funcs == ["think_format_reward"]
    assert args.use_cpu and args.save_strategy == "no" and args.learning_rate == 1e-5
    assert args.max_prompt_length is None and args.report_to == []
    assert args.vllm_importance_sampling_clip_max is None
    assert args.generation_kwargs == {"length_penalty": 1e-5}


def test_command_line_overrides_the_file():
    values = BASE | {"learning_rate": 1e-4, "generation_kwargs": {"num_beams": 2}, "seed": 3}
    file = write(values | {"reward_funcs": ["a.b", "c.d"]})
    overrides = ["--learning_rate", "1e-5", "--generation_kwargs", "{}", "--reward_funcs", "e.f"]
    for argv in (["--config", file, *overrides], [*overrides, "--config", file]):
        run, args = parse(argv)
        assert (args.learning_rate, args.generation_kwargs, args.seed) == (1e-5, {}, 3)
        assert run.reward_funcs == ["e.f"]


# 9 levels of 9 aliases each
ALIASES = "loss_kwargs:\n  a: &a [x, x]\n" + "".join(
    f"  {name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "learning_rat: 1",
            "run.yaml has an unknown argument: learning_rat (is it learning_rate?)",
        ),
        ("vllm_modus: colocate", "run.yaml has an unknown argument: vllm_modus"),
        ("seed: 1\nseed: 2", "run.yaml has seed more than once"),
        ("generation_kwargs: {}\ngeneration_kwargs: {}", "generation_kwargs more than once"),
        ("seed: {a: 1}", "run.yaml: seed cannot be a dict"),
        ("seed: [1]", "run.yaml: seed cannot be a list"),
        ("reward_weights: [[1]]", "run.yaml: reward_weights cannot be a list"),
        ("num_generations:", "run.yaml: num_generations cannot be a null"),
        ("- seed", "expected `name: value` lines in run.yaml"),
        ("", "expected `name: value` lines in run.yaml"),
        ("a: [", "run.yaml is not YAML"),
        ("[1]: 2", "expected `name: value` lines in run.yaml"),
        (f"reward_funcs: {'[' * 3000}{']' * 3000}", "run.yaml is nested too deep"),
        (ALIASES, "run.yaml is not YAML: expected at most 100,000 values, aliases included"),
        (ALIASES.replace("loss_kwargs", "unknown"), "expected at most 100,000 values"),
        ("loss_kwargs: &a [*a]", "expected at most 100,000 values"),
        ("seed: !!python/name:os.getpid", "run.yaml: seed cannot be read: could not determine"),
        ("generation_kwargs: {[1]: 2}", "run.yaml: generation_kwargs cannot be read: while"),
        ("generation_kwargs: {a: 2024-13-01}", "run.yaml: generation_kwargs cannot be read: month"),
    ],
)
def test_wrong_files(text, message):
    Path("run.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(["--config", "run.yaml"])


def test_a_wrong_value_names_the_file(capsys):
    Path("run.yaml").write_text("num_generations: four\n")
    with pytest.raises(SystemExit):
        parse(["--config", "run.yaml"])
    assert "--config: run.yaml: argument --num_generations" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"generation_kwargs: expected JSON, got '{1'"):
        parse([*words(RUN), "--generation_kwargs", "{1"])
