"""What shows a run while it goes on, and what it leaves to look at."""

from __future__ import annotations

import sys

from rich.console import Console
from transformers import ProgressCallback, Trainer

from grpo_trainer.monitor.live import LiveView
from grpo_trainer.monitor.progress import PlainProgress
from grpo_trainer.monitor.recipe import Recipe
from grpo_trainer.monitor.report.command import ReportWriter


def watch(trainer: Trainer, rewards: dict[str, float], engine: str | None) -> Recipe:
    """Add the view and the report, and say what the run is made of.

    Args:
        trainer: of the run.
        rewards: weights by name.
        engine: kind of a rollout engine that no argument names.
    """
    if trainer.args.write_report:
        trainer.add_callback(ReportWriter(trainer))
    show_progress(trainer)
    return Recipe.of(trainer, rewards, engine)


def show_progress(trainer: Trainer, console: Console | None = None) -> None:
    """Replace the bar of transformers: a live view in a terminal, lines elsewhere.

    A notebook keeps its own table, and nothing is shown with ``disable_tqdm``.
    """
    bars = [item for item in trainer.callback_handler.callbacks if type(item) is ProgressCallback]
    if not bars:
        return
    console = console or Console(file=sys.stderr)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(LiveView(console) if console.is_terminal else PlainProgress(console))
