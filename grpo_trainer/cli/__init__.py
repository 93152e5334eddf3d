"""The commands ``grpo-train``, ``grpo-train serve`` and ``grpo-train report``. May know every room.

Nothing heavy is imported before a command runs: a vLLM server imports the guard, and that alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from grpo_trainer.cli.errors import fail
from grpo_trainer.cli.help import answer


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``grpo-train`` with ``argv``, by default that of the process.

    The package installs without what the trainer imports; one line says so where it is missing.
    """
    words = sys.argv[1:] if argv is None else argv
    if words and words[0].startswith("-"):  # else it is a command
        try:
            answer(words)
        except ValueError as error:
            fail(str(error))
    try:
        from grpo_trainer.cli.train import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("grpo_"):
            raise
        from grpo_kernels.tools import install_command

        missing, command = error.name.split(".")[0], install_command("tools", "trainer")
        fail(f"expected the package {missing} to be installed; {command}")
    run(words)
