"""``python -m grpo_trainer.cli``: grpo-train for launchers that take a module."""

from grpo_trainer.cli import main

main()
