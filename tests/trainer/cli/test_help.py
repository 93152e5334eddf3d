"""The help: the short one imports nothing, the long one describes every argument."""

from __future__ import annotations

import contextlib
import inspect
import re
import subprocess
import sys
from dataclasses import fields

import pytest
from transformers import TrainingArguments

from grpo_kernels import LossConfig
from grpo_kernels.losses import LOSSES
from grpo_trainer.cli import main
from grpo_trainer.cli.parser import own_configs
from grpo_trainer.cli.train import run_parser
from grpo_trainer.config import GRPOConfig
from grpo_trainer.config.fields import GRPOFields
from tests.support.launch import unread

HEAVY = ("torch", "transformers", "accelerate", "datasets", "numpy")
ACTIONS = {item.dest: item for item in reversed(run_parser()._actions)}
FIRST = [
    *("model_name_or_path", "dataset_name", "reward_funcs", "output_dir", "max_steps"),
    *("num_generations", "max_completion_length"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
    *("learning_rate", "logging_steps", "save_steps"),
]


def test_the_short_help_has_what_one_needs_first(capsys):
    main(["--version"])
    assert capsys.readouterr().out.startswith("grpo-train ")
    main(["--help"])
    short = capsys.readouterr().out
    named = re.findall(r"^  --(\w+) ([A-Z].*?)  ", short.partition("The dozen to know:\n")[2], re.M)
    assert [name for name, _ in named] == [*FIRST, "config", "accelerate_config"]
    kinds = {None: "{0}", "+": "{0} [{0} ...]"}
    for name, kind in named[: len(FIRST)]:
        assert kind == kinds[ACTIONS[name].nargs].format(ACTIONS[name].metavar)
    assert f"{', '.join(own_configs())};" in " ".join(short.split())
    assert short.count("\n") < 50 and "--help-all" in short


def test_the_long_help_has_every_argument(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    main(["--help"])
    short = capsys.readouterr().out
    main(["--beta", "0", "--help-all"])
    said = capsys.readouterr().out
    assert said.startswith(short) and "--no_" not in said.removeprefix(short)
    for name in ACTIONS:
        assert re.search(rf"^  (-h, )?--{name}\b", said, re.M), name
    assert "--top_k INT, --top-k INT\n" in said and "0: from all. (default: 0)\n" in said


def test_arguments_are_described_next_to_their_fields():
    """Those of transformers by transformers, unless they have another default."""
    inherited = TrainingArguments.__dataclass_fields__
    for item in fields(GRPOConfig):
        assert item.metadata["help"], item.name
        if item.name in inherited and item.name not in GRPOFields.__dataclass_fields__:
            assert item.metadata == inherited[item.name].metadata
    assert all(item.help for item in ACTIONS.values())


@pytest.mark.parametrize(
    "owner", dict.fromkeys((LossConfig, *(v.surrogate for v in LOSSES.values())))
)
def test_settings_of_losses_are_described_as_in_their_classes(owner):
    section = (inspect.getdoc(owner) or "").partition("Args:")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {4}(\w+):(.*(?:\n {8}.*)*)", section, re.M)
    for name, text in entries:
        if name in GRPOConfig.__dataclass_fields__ and name != "max_completion_length":
            assert " ".join(text.replace("``", "`").split()) in ACTIONS[name].help


def test_the_short_help_imports_nothing_heavy():
    script = (
        f"import sys; sys.modules |= dict.fromkeys({HEAVY!r})\n"
        "from grpo_trainer.cli import main; main(['--config', 'run.yaml', '-h'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: grpo-train"), done.stderr


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--help-all"], ["--version"], ["serve", "--help"], ["report", "--help"]],
    ids=str,
)
def test_what_is_printed_may_be_read_in_part(monkeypatch, words):
    with unread() as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        with contextlib.suppress(SystemExit):
            main(words)
        output.flush()  # as Python does at its end
