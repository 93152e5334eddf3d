"""The help as a file: it is what the parser takes, and nothing is imported for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from accelerate.commands.launch import launch_command_parser

from grpo_trainer.cli import HELP, main, options
from grpo_trainer.cli.help import help_text
from grpo_trainer.config import GRPOConfig

HEAVY = ("torch", "transformers", "accelerate", "datasets", "numpy")


def test_the_file_is_what_the_parser_takes():
    assert HELP.read_text() == help_text(), "python -m grpo_trainer.cli.help writes it"


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["--config", "run.yaml", "-h"], 0, "usage: grpo-train"),
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


def test_the_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out.startswith("grpo-train ")


def test_options_of_other_packages_are_none_that_are_misspelled(tmp_path, monkeypatch):
    """Also those of versions that the file does not know."""
    monkeypatch.setattr(options, "HELP", tmp_path / "help.txt")
    options.HELP.write_text("")
    launcher = [flag for flag in launch_command_parser()._option_string_actions if "_" in flag]
    assert launcher
    of_transformers = [f"--{name}" for name in GRPOConfig.__mro__[-2].__dataclass_fields__]
    options.check_options([*launcher, *of_transformers, "--no_dataloader_pin_memory=false"])
    with pytest.raises(ValueError, match="--learning_rates: there is no such argument"):
        options.check_options(["--learning_rates", "1"])
