"""The commands ``grpo-train``, ``grpo-train serve`` and ``grpo-train report``. May know every room.

Nothing is imported before a command runs: a vLLM server imports the guard, and that alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``grpo-train`` with ``argv``, by default that of the process.

    The package installs without what the trainer imports; one line says so where it is missing.
    """
    try:
        from grpo_trainer.cli.train import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("grpo_"):
            raise
        print(
            f"grpo-train: error: expected the package {error.name.split('.')[0]} to be installed; "
            "pip install 'grpo-kernels[trainer]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    run(argv)
