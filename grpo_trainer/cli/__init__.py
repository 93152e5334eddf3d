"""The commands ``grpo-train``, ``grpo-train serve`` and ``grpo-train report``.

Nothing heavy is imported before a command runs: a vLLM server imports only the guard.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from grpo_trainer.cli.usage import USAGE

_ENDED_BY_SIGINT = 130  # a shell's exit code for it


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``grpo-train`` with ``argv``; default: the arguments of the process.

    The package can be installed without the trainer's dependencies; a one-line error names a
    missing one. After Ctrl-C, one line says where the run ended, and the exit code is 130.
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
    """Return whether an error is a Ctrl-C, or comes from a library that cleaned up after one."""
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
    """Print text that may be cut off, as by ``| head``; grpo_kernels' own function is slow to
    import."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
