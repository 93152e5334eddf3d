"""Who shows a run: a view of ours takes the place of transformers' bar."""

from __future__ import annotations

from rich.console import Console
from transformers import ProgressCallback, Trainer

from grpo_trainer.monitor.view import RichProgressCallback, RunView

_OF_NOTEBOOKS = "NotebookProgressCallback"  # transformers has it in a notebook


def show_progress(trainer: Trainer, console: Console | None = None) -> None:
    """Replace the bar of transformers, or its table in a notebook, by a view.

    Nothing is shown with ``disable_tqdm``. A view among the callbacks is the one that shows.
    """
    kinds = {type(item) for item in trainer.callback_handler.callbacks}
    for kind in kinds:
        if kind is ProgressCallback:
            trainer.remove_callback(kind)
            if RichProgressCallback not in kinds:
                trainer.add_callback(RunView(console))
        elif kind.__name__ == _OF_NOTEBOOKS:
            from grpo_trainer.monitor.notebook import NotebookView

            trainer.remove_callback(kind)
            trainer.add_callback(NotebookView())


def close_progress(trainer: Trainer) -> None:
    """Give the terminal back, however training has ended."""
    for item in trainer.callback_handler.callbacks:
        if isinstance(item, RunView):
            item.on_train_end()
