"""The commands ``grpo-train``, ``grpo-train serve`` and ``grpo-train report``.

Nothing heavy is imported before a command runs: a vLLM server imports the guard, and that alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from grpo_trainer.cli.usage import USAGE

_ENDED_BY_SIGINT = 130  # as a shell says


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``grpo-train`` with ``argv``, by default that of the process.

    The package installs without what the trainer imports; one line says so where it is missing. One
    line says where Ctrl-C has ended a run, too, and the exit code is 130.
    """
    try:
        _run(sys.argv[1:] if argv is None else argv)
    except BaseException as error:
        if not _is_ctrl_c(error):
            raise
        if os.environ.get("RANK", "0") == "0":  # the first process speaks for all
            where = str(error) if isinstance(error, KeyboardInterrupt) else ""
            print(f"grpo-train: {where or 'stopped'}", file=sys.stderr)
        raise SystemExit(_ENDED_BY_SIGINT) from None


def _is_ctrl_c(error: BaseException | None) -> bool:
    """Return whether an error is a Ctrl-C, or of a library that cleaned up after one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _run(words: Sequence[str]) -> None:
    if words and words[0].startswith("-"):  # else it is a command
        if "--version" in words:
            from grpo_kernels.common import VERSION

            _print_for_a_reader(f"grpo-train {VERSION}\n")
            return
        if "--help" in words or "-h" in words:
            _print_for_a_reader(f"usage: {USAGE}")
            return
    try:
        from grpo_trainer.cli.train import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("grpo_"):
            raise
        from grpo_kernels.tools import OneLineParser, install_command

        missing, command = error.name.split(".")[0], install_command("tools", "trainer")
        OneLineParser(prog="grpo-train").error(
            f"expected the package {missing} to be installed; {command}"
        )
    run(words)


def _print_for_a_reader(text: str) -> None:
    """Print what may be read in part, as by ``| head``; grpo_kernels' own function is slow to
    import."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
