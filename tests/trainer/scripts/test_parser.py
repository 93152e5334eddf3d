"""TrlParser in a script of the user's."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from grpo_trainer import GRPOConfig, ModelConfig, ScriptArguments, TrlParser


@dataclass
class Own:
    needed: int
    name: str = "alpha"
    several: list[str] = field(default_factory=list)
    maybe: bool | None = None
    table: dict[str, int] | str | None = None
    plain: dict | None = None


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_VARIABLE", "before")


def write(text: str) -> list[str]:
    Path("run.yaml").write_text(text)
    return ["--config", "run.yaml"]


def test_the_command_line_over_the_file_over_the_defaults():
    config = write(
        "needed: 23\nname: beta\nseveral: [a, b]\ntable: {a: 1}\nplain: {b: 2}\n"
        "env: {A_VARIABLE: 1e-6}"
    )
    [own] = TrlParser(Own).parse_args_and_config([*config, "--name", "gamma", "--maybe"])
    assert own == Own(23, "gamma", ["a", "b"], True, {"a": 1}, {"b": 2})
    assert os.environ["A_VARIABLE"] == "1e-6"
    [own] = TrlParser([Own]).parse_args_and_config(["--needed", "5"])
    assert own == Own(5)
    assert TrlParser().parse_args_and_config([]) == ()


def test_the_words_of_the_process(monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["train.py", "--needed", "5", f"--config={write('name: b')[1]}"]
    )
    assert TrlParser(Own).parse_args_and_config() == (Own(5, "b"),)


def test_unknown_arguments():
    config = write("needed: 1\nstrange: [2, 3]\n")
    parser = TrlParser((Own, ScriptArguments))
    with pytest.raises(ValueError, match="run.yaml has an unknown argument: strange"):
        parser.parse_args_and_config(config)
    assert parser.parse_args_and_config(config, fail_with_unknown_args=False)[0].needed == 1
    for fails in (True, False):
        with pytest.raises(ValueError, match=r"--nam: there is no such argument \(is it name\?\)"):
            parser.parse_args_and_config(
                ["--needed", "1", "--nam", "b"], fail_with_unknown_args=fails
            )
    words = [*config, "--other", "4"]
    *found, rest = parser.parse_args_and_config(words, return_remaining_strings=True)
    assert len(found) == 2 and rest == ["--strange", "2", "3", "--other", "4"]
    *_, of_file, of_line = parser.parse_args_and_config(
        words, return_remaining_strings=True, separate_remaining_strings=True
    )
    assert (of_file, of_line) == (["--strange", "2", "3"], ["--other", "4"])


def test_errors_are_one_line(capsys):
    config = ["--config", "run.yaml"]
    for text, words, message in (
        ("", [], "the following arguments are required: --needed"),
        ("", ["--needed", "one"], "argument --needed: invalid int value: 'one'"),
        ("needed: one", [*config, "--name", "b"], "--config: run.yaml: argument --needed: invalid"),
        ("name: one", config, "the following arguments are required: --needed"),
        ("", ["--config"], "argument --config: expected one argument"),
    ):
        write(text)
        with pytest.raises(SystemExit) as error:
            TrlParser(Own, prog="train.py").parse_args_and_config(words)
        shown = capsys.readouterr().err
        assert error.value.code == 2 and shown.count("\n") == 1
        assert shown.startswith(f"train.py: error: {message}")


@pytest.mark.parametrize("text", ["env: 1", "env: [A]", "env: {A: [1]}"])
def test_wrong_environments(text):
    with pytest.raises(ValueError, match="run.yaml: expected `NAME: value` lines in env"):
        TrlParser(Own).parse_args_and_config(write(text))


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
        parser.parse_args_and_config(write(f"{name}: x"))


def test_every_flag_is_one():
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    flags = ["--tf32", "--bf16", "--use_peft", "--log_completions", "--disable_tqdm", "--use_cpu"]
    _, args, model = parser.parse_args_and_config([*flags[2:], "--ddp_static_graph"])
    assert args.log_completions and args.disable_tqdm and args.ddp_static_graph is True
    assert model.use_peft
    known, _ = parser.parse_known_args(flags)
    assert known.tf32 is True and known.bf16 is True
