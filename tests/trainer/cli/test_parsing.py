"""Python, the command line and a YAML file configure the same run; scripts of users, too."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from transformers import TrainingArguments

from grpo_trainer import GRPOConfig, ModelConfig, ScriptArguments, TrlParser
from grpo_trainer.cli.train import parse
from grpo_trainer.config.old_names import OldNames

RUN = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["think_format_reward"]}
# what makes the values below possible together
BASE = {"use_cpu": True, "per_device_train_batch_size": 24, "per_device_eval_batch_size": 24}
HINTS = get_type_hints(GRPOConfig)


def own_fields() -> dict[str, Any]:
    """Return the defaults of the fields that GRPOConfig adds or whose default it changes."""
    inherited = {item.name: item.default for item in dataclasses.fields(TrainingArguments)}
    old = {item.name for item in dataclasses.fields(OldNames)}
    return {
        item.name: item.default
        for item in dataclasses.fields(GRPOConfig)
        if item.name not in old and inherited.get(item.name, own_fields) != item.default
    }


# where one of the field's type will not do
VALUES: dict[str, Any] = {
    "bf16": False,
    "model_init_kwargs": {"dtype": "bfloat16", "attn": {"a": 1e-6}},
    "allowed_media_path": "images",
    "on_bad_image": "skip",
    "generation_batch_size": 48,
    "generation_kwargs": {"num_beams": 2, "length_penalty": 1e-6, "bad_words_ids": [[1], [2]]},
    "chat_template_kwargs": {"enable_thinking": False, "level": "007"},
    "cache_implementation": "static",
    "reward_weights": [1, -0.5, 2e-1],
    "scale_rewards": False,
    "multi_objective_aggregation": "normalize_then_sum",
    "pad_to_multiple_of": 8,
    "dynamic_prompts_fn": "package.module.function",
    "dynamic_prompts_form": "groups",
    "log_completions_hub_repo": "owner/logs",
    "loss_type": "grpo",
    "loss_kwargs": {"epsilon": 0.3},
    "delta": 4.0,
    "dual_clip": 3.0,
    "importance_sampling_level": "sequence",
    "kl_estimator": "k1",
    "rollout_engine": "transformers",
    "transformers_continuous_batching_config": {"num_blocks": 64},
    "vllm_mode": "server",
    "vllm_model_impl": "transformers",
    "vllm_structured_outputs_regex": "[0-9]{3}",
    "vllm_server_base_url": "http://10.0.0.1:9000",
    "vllm_server_host": "10.0.0.1",
    "vllm_weight_transfer": "file",
    "vllm_weights_folder": "shared/weights",
    "vllm_engine_kwargs": {"enforce_eager": True, "max_num_seqs": 16},
    "vllm_importance_sampling_mode": "token_truncate",
}
NEEDS = {
    **{
        name: {"loss_type": name.split("_")[0]}
        for name in own_fields()
        if name.startswith(("sapo_", "vespo_", "gmpo_"))
    },
    "dynamic_prompts_form": {"dynamic_prompts_fn": "package.module.function"},
    "log_completions_hub_repo": {"log_completions": True},
    "sync_ref_model": {"beta": 0.1},
    "use_adaptive_entropy": {"entropy_coef": 0.1},
    "backward_exact_weight": {"backward_tolerance": 2e-3},
    "use_sampling_mask": {"top_k": 20},
    "transformers_continuous_batching_config": {"use_transformers_continuous_batching": True},
}


def another_value(name: str) -> Any:
    """Return a value other than the default, made of the field's type."""
    if name in VALUES:
        return VALUES[name]
    default, kinds = own_fields()[name], {HINTS[name], *get_args(HINTS[name])}
    if bool in kinds:
        return not default
    if float in kinds:
        return default / 2 if default else 0.25
    assert int in kinds, f"VALUES has no {name}"
    return 3 if default is None else default // 2 or default + 1


def write(values: dict[str, Any]) -> str:
    Path("run.yaml").write_text(yaml.safe_dump(RUN | values))
    return "run.yaml"


def in_file(text: str) -> list[str]:
    Path("run.yaml").write_text(text)
    return ["--config", "run.yaml"]


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
    found = {item.name: getattr(args, item.name) for item in dataclasses.fields(args)}
    return found | {"accelerator_config": args.accelerator_config.to_dict()}


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_VARIABLE", "before")
    Path(VALUES["allowed_media_path"]).mkdir()


INHERITED = {
    "output_dir": "out",
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "weight_decay": 1e-2,
    "save_strategy": "no",
    "eval_strategy": "no",
    "accelerator_config": {"split_batches": False, "even_batches": True},
    "seed": 7,
    "run_name": "no",
}


@pytest.mark.parametrize("name", [*own_fields(), "inherited"])
def test_every_field_is_the_same_three_ways(name):
    value = INHERITED if name == "inherited" else {name: another_value(name)}
    values = BASE | NEEDS.get(name, {}) | value
    python = canonical(GRPOConfig(**values))
    assert canonical(parse(words(RUN | values))[1]) == python
    assert canonical(parse(["--config", write(values)])[1]) == python
    if name == "inherited":
        assert python["run_name"] == "no"
    else:
        assert python[name] != own_fields()[name] or name == "bf16"


def test_a_whole_config_survives_the_file():
    args = GRPOConfig(**BASE, num_generations=4, beta=0.1, report_to=["none"])
    values = {name: value for name, value in args.to_dict().items() if value is not None}
    set_by_the_other = ("generation_batch_size", "accelerator_config")
    for name in set_by_the_other:
        values.pop(name)
    again = parse(["--config", write(values)])[1]
    assert again.to_dict() == args.to_dict()


def test_words_stay_words_and_numbers_numbers():
    text = (
        "model_name_or_path: m\ndataset_name: d\nreward_funcs: think_format_reward\n"
        "use_cpu: yes\nsave_strategy: no\nlearning_rate: 1e-5\nmax_prompt_length: null\n"
        "vllm_importance_sampling_clip_max: null\nrun_name: -foo\nreward_weights: -1e-3\n"
        "generation_kwargs: {length_penalty: 1e-5}\nreport_to: [none]\n"
        "resume_from_checkpoint: false\n"
    )
    run, args = parse(in_file(text))
    assert run.reward_funcs == ["think_format_reward"]
    assert args.use_cpu and args.save_strategy == "no" and args.learning_rate == 1e-5
    assert args.max_prompt_length is None and args.report_to == []
    assert args.vllm_importance_sampling_clip_max is None and args.resume_from_checkpoint is None
    assert args.generation_kwargs == {"length_penalty": 1e-5}
    assert (args.run_name, args.reward_weights) == ("-foo", [-1e-3])


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
        ("learning_rat: 1", "has an unknown argument: learning_rat (is it learning_rate?)"),
        ("vllm_modus: colocate", "has an unknown argument: vllm_modus"),
        ("seed: 1\nseed: 2", "has seed more than once"),
        ("generation_kwargs: {}\ngeneration_kwargs: {}", "has generation_kwargs more than once"),
        ("seed: {a: 1}", ": seed cannot be a dict"),
        ("seed: [1]", ": seed cannot be a list"),
        ("reward_weights: [[1]]", ": reward_weights cannot be a list"),
        ("num_generations:", ": num_generations cannot be a null"),
        ("- seed", "expected `name: value` lines in run.yaml"),
        ("", "expected `name: value` lines in run.yaml"),
        ("a: [", " is not YAML"),
        ("[1]: 2", "expected `name: value` lines in run.yaml"),
        (f"reward_funcs: {'[' * 3000}{']' * 3000}", " is nested too deep"),
        (ALIASES, " is not YAML: expected at most 100,000 values, aliases included"),
        (ALIASES.replace("loss_kwargs", "unknown"), "expected at most 100,000 values"),
        ("loss_kwargs: &a [*a]", "expected at most 100,000 values"),
        ("seed: !!python/name:os.getpid", ": seed cannot be read: could not determine"),
        ("generation_kwargs: {[1]: 2}", ": generation_kwargs cannot be read: while"),
        ("generation_kwargs: {a: 2024-13-01}", ": generation_kwargs cannot be read: month"),
        ("generation_kwargs: '{1'", "generation_kwargs: expected JSON, got '{1'"),
        *(
            (text, ": expected `NAME: value` lines in env")
            for text in ("env: 1", "env: [A]", "env: {A: [1]}")
        ),
    ],
    ids=lambda value: value[:30],
)
def test_wrong_files(text, message):
    argv = [*words(RUN), *in_file(text)]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse(argv)
    assert "run.yaml" in str(error.value) or "JSON" in message


@dataclass
class Own:
    """Arguments of a script of a user's."""

    needed: int
    name: str = "alpha"
    several: list[str] = field(default_factory=list)
    maybe: bool | None = None
    table: dict[str, int] | str | None = None
    plain: dict | None = None


def test_the_command_line_over_the_file_over_the_defaults(monkeypatch):
    config = in_file(
        "needed: 23\nname: beta\nseveral: [a, b]\ntable: {a: 1}\nplain: {b: 2}\n"
        "env: {A_VARIABLE: 1e-6}"
    )
    [own] = TrlParser(Own).parse_args_and_config([*config, "--name", "gamma", "--maybe"])
    assert own == Own(23, "gamma", ["a", "b"], True, {"a": 1}, {"b": 2})
    assert os.environ["A_VARIABLE"] == "1e-6"
    assert TrlParser([Own]).parse_args_and_config(["--needed", "5"]) == (Own(5),)
    assert TrlParser().parse_args_and_config([]) == ()
    in_file("name: b")
    monkeypatch.setattr("sys.argv", ["train.py", "--needed", "5", "--config=run.yaml"])
    assert TrlParser(Own).parse_args_and_config() == (Own(5, "b"),)


def test_unknown_arguments():
    config = in_file("needed: 1\nstrange: [2, 3]\n")
    parser = TrlParser((Own, ScriptArguments))
    with pytest.raises(ValueError, match="run.yaml has an unknown argument: strange"):
        parser.parse_args_and_config(config)
    assert parser.parse_args_and_config(config, fail_with_unknown_args=False)[0].needed == 1
    for fails in (True, False):
        with pytest.raises(ValueError, match=r"--nam: there is no such argument \(is it name\?\)"):
            parser.parse_args_and_config(
                ["--needed", "1", "--nam", "b"], fail_with_unknown_args=fails
            )
    argv = [*config, "--other", "4"]
    *found, rest = parser.parse_args_and_config(argv, return_remaining_strings=True)
    assert len(found) == 2 and rest == ["--strange", "2", "3", "--other", "4"]
    *_, of_file, of_line = parser.parse_args_and_config(
        argv, return_remaining_strings=True, separate_remaining_strings=True
    )
    assert (of_file, of_line) == (["--strange", "2", "3"], ["--other", "4"])


def test_errors_are_one_line(capsys):
    config = ["--config", "run.yaml"]
    for text, argv, message in (
        ("", [], "the following arguments are required: --needed"),
        ("", ["--needed", "one"], "argument --needed: invalid int value: 'one'"),
        ("needed: one", [*config, "--name", "b"], "--config: run.yaml: argument --needed: invalid"),
        ("name: one", config, "the following arguments are required: --needed"),
        ("", ["--config"], "argument --config: expected one argument"),
    ):
        in_file(text)
        with pytest.raises(SystemExit) as error:
            TrlParser(Own, prog="train.py").parse_args_and_config(argv)
        shown = capsys.readouterr().err
        assert error.value.code == 2 and shown.count("\n") == 1
        assert shown.startswith(f"train.py: error: {message}")


def test_a_field_that_is_taken():
    @dataclass
    class Taken:
        config: str = ""

    with pytest.raises(ValueError, match="expected no field `config`.* in Taken"):
        TrlParser(Taken)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("torch_dtype", "dtype"),
        ("revision", "model_revision"),
        ("model", "model_name_or_path"),
        ("evaluation_strategy", "eval_strategy"),
        ("no_cuda", "use_cpu"),
        ("vllm_dtype", "vllm_engine_kwargs"),
        ("dataset_split", "dataset_train_split"),
        ("num_generation", "num_generations"),
    ],
)
def test_hints_name_the_right_field(name, right):
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    with pytest.raises(ValueError, match=rf"--{name}: .* \(is it {right}\?\)"):
        parser.parse_args_and_config([f"--{name}", "x"])
    with pytest.raises(ValueError, match=rf"unknown argument: {name} \(is it {right}\?\)"):
        parser.parse_args_and_config(in_file(f"{name}: x"))


def test_every_flag_is_one():
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    flags = ["--tf32", "--bf16", "--use_peft", "--log_completions", "--disable_tqdm", "--use_cpu"]
    _, args, model = parser.parse_args_and_config([*flags[2:], "--ddp_static_graph"])
    assert args.log_completions and args.disable_tqdm and args.ddp_static_graph is True
    assert model.use_peft
    known, _ = parser.parse_known_args(flags)
    assert known.tf32 is True and known.bf16 is True
