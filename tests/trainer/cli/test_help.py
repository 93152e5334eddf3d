"""The help as a file: it is what the parser takes, and nothing is imported for it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from accelerate.commands.launch import launch_command_parser

from grpo_trainer.cli import help as helping
from grpo_trainer.cli import main
from grpo_trainer.cli.help_file import help_text
from grpo_trainer.cli.train import run_parser
from grpo_trainer.config import GRPOConfig

HEAVY = ("torch", "transformers", "accelerate", "datasets", "numpy")


def test_the_file_is_what_the_parser_takes():
    written = helping.HELP.read_text()
    assert written == help_text(), "python -m grpo_trainer.cli.help_file writes it"
    shown = re.findall(r"^  --(\w+)", written, re.M)
    taken = {action.dest for action in run_parser()._actions}
    assert sorted(shown) == sorted({*taken, "accelerate_config", "version"})
    assert "grpo-train serve " in written and "grpo-train report " in written
    assert len(re.findall(r"^\w.*:$", written, re.M)) > 10
    assert max(len(line) for line in written.splitlines()) <= 88


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["--help"], 0, "usage: grpo-train"),
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


def test_short_answers(capsys):
    said = []
    for words in (["--version"], ["--config", "run.yaml", "-h"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
        said.append(capsys.readouterr().out)
    assert re.fullmatch(r"grpo-train \d+\.\d+\.\d+\n", said[0])
    assert said[1].startswith("usage: grpo-train")
    for wrong, right in (("--epsilon_hgih", "epsilon_high"), ("--loss-tpye=dapo", "loss_type")):
        with pytest.raises(ValueError, match=rf"{wrong.partition('=')[0]}: .*\(is it {right}\?\)"):
            helping.answer([wrong, "1"])
    # a value is no option
    helping.answer(["--generation_kwargs", "--not an option", "--run_name", "-1"])


def test_options_of_other_packages_are_none_that_are_misspelled(tmp_path, monkeypatch):
    """Also those of versions that the file does not know."""
    monkeypatch.setattr(helping, "HELP", tmp_path / "help.txt")
    helping.HELP.write_text("")
    launcher = [flag for flag in launch_command_parser()._option_string_actions if "_" in flag]
    assert launcher
    of_transformers = [f"--{name}" for name in GRPOConfig.__mro__[-2].__dataclass_fields__]
    helping.answer([*launcher, *of_transformers, "--no_dataloader_pin_memory=false"])
    with pytest.raises(ValueError, match="--learning_rates: there is no such argument"):
        helping.answer(["--learning_rates", "1"])
