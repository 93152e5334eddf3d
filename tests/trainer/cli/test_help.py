"""The help as a file: it is what the parser takes, and nothing is imported for it."""

from __future__ import annotations

import subprocess
import sys

from grpo_trainer.cli import HELP, main
from grpo_trainer.cli.help import help_text

HEAVY = ("torch", "transformers", "accelerate", "datasets", "numpy")


def test_the_file_is_what_the_parser_takes():
    assert HELP.read_text() == help_text(), "python -m grpo_trainer.cli.help writes it"


def test_help_imports_nothing_heavy():
    script = (
        f"import sys; sys.modules |= dict.fromkeys({HEAVY!r})\n"
        "from grpo_trainer.cli import main; main(['--config', 'run.yaml', '-h'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == HELP.read_text()


def test_the_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out.startswith("grpo-train ")
