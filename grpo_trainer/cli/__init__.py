"""The commands ``grpo-train``, ``grpo-train serve`` and ``grpo-train report``. May know every room.

Nothing is imported before a command runs: a vLLM server imports the guard, and that alone.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``grpo-train`` with ``argv``, by default that of the process."""
    from grpo_trainer.cli.train import main as run

    run(argv)
