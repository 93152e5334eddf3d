"""What shows a run while it goes on, and what it leaves to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_trainer.progress import show_progress
from grpo_trainer.recipe import Recipe
from grpo_trainer.report.callback import ReportWriter
from grpo_trainer.rewards import RewardFunction
from grpo_trainer.rollout import RolloutEngine

if TYPE_CHECKING:
    from grpo_trainer.trainer import GRPOTrainer


def watch(
    trainer: GRPOTrainer, rewards: list[RewardFunction], engine: RolloutEngine | None
) -> Recipe:
    """Adds the view and the report, and says what the run is made of.

    ``engine`` is a rollout engine that no argument names.
    """
    if trainer.args.write_report:
        trainer.add_callback(ReportWriter(trainer))
    show_progress(trainer)
    return Recipe.of(trainer, rewards, type(engine).__name__ if engine is not None else None)
