"""The help as a file: it is what the parser takes, and nothing is imported for it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from transformers.hf_argparser import string_to_bool

from grpo_kernels import LossConfig
from grpo_kernels.losses import LOSSES
from grpo_trainer import common
from grpo_trainer.cli import HELP, main
from grpo_trainer.cli.parser import own_configs
from grpo_trainer.cli.train import run_parser
from grpo_trainer.common import check_options
from grpo_trainer.config import GRPOConfig
from tests.support.launch import unread

ROOT = Path(__file__).parents[3]
(PINNED,) = re.findall(r"^transformers==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
HEAVY = ("torch", "transformers", "accelerate", "datasets", "numpy")
KINDS = {string_to_bool: "BOOL", int: "INT", float: "FLOAT"}
VALUES = {None: "{0}", "?": "[{0}]", "+": "{0} [{0} ...]"}


def described(section):
    entries = re.findall(r"^  --(\w+) (\S.*?)(?:  +(.+))?$((?:\n {24}.+)*)", section, re.M)
    options = {name: (kind, " ".join(f"{a}{b}".split())) for name, kind, a, b in entries}
    assert len(options) == len(entries)
    return options


def test_the_file_is_what_the_parser_takes():
    """The last section is that of one version of transformers."""
    file, theirs = map(described, HELP.read_text().split("\nOf transformers "))
    assert file.pop("config")[0] == "FILE" and file.pop("accelerate_config")[0] == "FILE"
    actions = {item.dest: item for item in reversed(run_parser()._actions)}
    del actions["config"], actions["help"]
    of_transformers = GRPOConfig.__mro__[-2].__dataclass_fields__.keys() - file.keys()
    assert file.keys() == actions.keys() - of_transformers
    if version("transformers") == PINNED:
        assert theirs.keys() == of_transformers
        file |= theirs
    for name, (kind, text) in file.items():
        action = actions[name]
        assert kind == VALUES[action.nargs].format(KINDS.get(action.type, "TEXT")), name
        default = text.partition("(default: ")[2]
        ours = text or name not in GRPOConfig.__mro__[-2].__dataclass_fields__
        expected = f"{action.default})" if ours and action.default is not None else ""
        assert default == expected, name
        of_transformers = name in GRPOConfig.__mro__[-2].__dataclass_fields__
        choices = () if of_transformers or not text else action.choices or ()
        assert all(str(choice) in text for choice in choices), name


FIRST = [
    *("model_name_or_path", "dataset_name", "reward_funcs", "output_dir", "max_steps"),
    *("num_generations", "max_completion_length"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
    *("learning_rate", "logging_steps", "save_steps"),
]


def test_the_short_help_has_what_one_needs_first(capsys):
    main(["--help-all"])
    assert capsys.readouterr().out == HELP.read_text()
    main(["--help"])
    short = capsys.readouterr().out
    assert HELP.read_text().startswith(short[:-1]) and short.count("\n") < 50
    named = re.findall(r"^  --(\w+) [A-Z]", short.partition("The dozen to know:\n")[2], re.M)
    assert named == [*FIRST, "config", "accelerate_config"]
    assert all(common.descriptions()[name] for name in named) and "--help-all" in short


def test_it_names_what_it_is_of():
    text = HELP.read_text()
    assert f"\nOf transformers {PINNED}; " in text
    assert f"\n{' ' * 24}{', '.join(own_configs())}.\n" in text


@pytest.mark.parametrize(
    "owner", dict.fromkeys((LossConfig, *(v.surrogate for v in LOSSES.values())))
)
def test_settings_of_losses_are_described_as_in_their_classes(owner):
    section = (owner.__doc__ or "").partition("Args:")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {8}(\w+):(.*(?:\n {12}.*)*)", section, re.M)
    texts = common.descriptions()
    for name, text in entries:
        if name in GRPOConfig.__dataclass_fields__ and name != "max_completion_length":
            assert " ".join(text.split()) in texts[name]


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["--config", "run.yaml", "-h"], 0, "usage: grpo-train"),
        (["--help-all"], 0, "--vllm_mode"),
        (["--beta", "0", "--model", "m"], 2, "(is it model_name_or_path?)"),
    ],
)
def test_answers_import_nothing_heavy(words, code, said):
    script = (
        f"import sys; sys.modules |= dict.fromkeys({HEAVY!r})\n"
        f"from grpo_trainer.cli import main; main({words!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code
    assert said in done.stdout + done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["serve", "--help"], ["report", "--help"]], ids=str
)
def test_what_is_printed_may_be_read_in_part(monkeypatch, words):
    with unread() as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        with contextlib.suppress(SystemExit):
            main(words)
        output.flush()  # as Python does at its end


def test_the_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out.startswith("grpo-train ")


def test_options_of_other_packages_are_none_that_are_misspelled(tmp_path, monkeypatch):
    """Also those of versions that the file does not know."""
    monkeypatch.setattr(common, "HELP", tmp_path / "help.txt")
    common.HELP.write_text("")
    launcher = [flag for flag in launch_command_parser()._option_string_actions if "_" in flag]
    assert launcher
    of_transformers = [f"--{name}" for name in GRPOConfig.__mro__[-2].__dataclass_fields__]
    check_options([*launcher, *of_transformers, "--no_dataloader_pin_memory=false"])
    with pytest.raises(ValueError, match="--learning_rates: there is no such argument"):
        check_options(["--learning_rates", "1"])
