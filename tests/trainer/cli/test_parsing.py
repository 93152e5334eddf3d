"""Python, the command line and a YAML file configure the same run; scripts of users, too."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers.hf_argparser import string_to_bool

from grpo_trainer import GRPOConfig, ModelConfig, ScriptArguments, TrlParser
from grpo_trainer.cli.train import parse, run_parser

RUN = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["think_format_reward"]}
# fields of every kind, of ours and of transformers', none with its default
VALUES: dict[str, Any] = {
    "output_dir": "out",
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 24,
    "generation_batch_size": 48,
    "num_generations": 4,
    "learning_rate": 2e-5,
    "beta": 0.1,
    "delta": 4.0,
    "top_k": 5,
    "loss_type": "grpo",
    "scale_rewards": False,
    "reward_weights": [1, -0.5, 2e-1],
    "loss_kwargs": {"epsilon_high": 0.3},
    "generation_kwargs": {"num_beams": 2, "length_penalty": 1e-6, "bad_words_ids": [[1], [2]]},
    "chat_template_kwargs": {"enable_thinking": False, "level": "007"},
    "vllm_structured_outputs_regex": "[0-9]{3}",
    "pad_to_multiple_of": 8,
    "lr_scheduler_type": "constant_with_warmup",
    "save_strategy": "no",
    "accelerator_config": {"split_batches": False, "even_batches": True},
    "run_name": "no",
}


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


def test_a_config_is_the_same_three_ways():
    python = canonical(GRPOConfig(**VALUES))
    assert canonical(parse(words(RUN | VALUES))[1]) == python
    assert canonical(parse(["--config", write(VALUES)])[1]) == python


def test_every_boolean_has_a_no():
    """Whatever its default is. It overrides the file, and dashes may replace its underscores."""
    actions = run_parser()._actions
    names = [item.dest for item in actions if item.type is string_to_bool]
    assert {"gradient_checkpointing", "activation_checkpointing", "bf16"} <= set(names)
    known, unknown = run_parser().parse_known_args([*words(RUN), *(f"--no_{x}" for x in names)])
    assert not any(getattr(known, name) for name in names) and unknown == []
    _, args = parse([*words(RUN), "--no_gradient_checkpointing", "--no-bf16", "--use_cpu"])
    assert not args.activation_checkpointing and args.bf16 is False
    text = write({"activation_checkpointing": True, "use_cpu": True})
    assert not parse(["--config", text, "--no_activation_checkpointing"])[1].gradient_checkpointing


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "has an unknown argument: learning_rat (is it learning_rate?)"),
        ("seed: 1\nseed: 2", "seed is there more than once"),
        ("seed: {a: 1}", ": seed cannot be a dict"),
        ("num_generations:", ": num_generations cannot be a null"),
        ("- seed", "run.yaml cannot be read: expected `name: value` lines"),
        ("a: [", " cannot be read: while parsing"),
        (f"reward_funcs: {'[' * 5000}{']' * 5000}", " is nested too deep"),
        ("reward_funcs: [[a]]", ": reward_funcs cannot be a list"),
        ("seed: !!python/name:os.getpid", " cannot be read: could not determine"),
        ("generation_kwargs: {[1]: 2}", " cannot be read: while constructing"),
        ("generation_kwargs: '{1'", "generation_kwargs: expected JSON, got '{1'"),
        ("env: {A: [1]}", ": expected `NAME: value` lines in env"),
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
    given = ["--name", "gamma", "--several", "c", *config, "--maybe"]
    [own] = TrlParser(Own).parse_args_and_config(given)  # in whatever order
    assert own == Own(23, "gamma", ["c"], True, {"a": 1}, {"b": 2})
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
    with pytest.raises(ValueError, match=r"--nam: unknown argument \(is it name\?\)"):
        parser.parse_args_and_config(["--needed", "1", "--nam", "b"])


def test_errors_are_one_line(capsys):
    parser = TrlParser(Own, prog="train.py")
    for argv, message in (
        ([], "the following arguments are required: --needed"),
        (in_file("needed: one"), "--config: run.yaml: argument --needed: invalid int value: 'one'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args_and_config(argv)
        assert capsys.readouterr().err == f"train.py: error: {message}\n"
    with pytest.raises(ValueError, match="expected --name value, got 'more'"):
        parser.parse_args_and_config(["--needed", "1", "more"])


def test_hints_and_flags():
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    hints = {"model": "model_name_or_path", "vllm_dtype": "vllm_engine_kwargs"}
    for name, right in hints.items():
        with pytest.raises(ValueError, match=rf"--{name}: .* \(is it {right}\?\)"):
            parser.parse_args_and_config([f"--{name}", "x"])
    flags = ["tf32", "bf16", "use_peft", "log_completions", "disable_tqdm", "ddp_static_graph"]
    known, _ = parser.parse_known_args([f"--{name}" for name in flags])
    assert all(getattr(known, name) is True for name in flags)
