"""The view of a run in a notebook; imported only there, because transformers needs IPython."""

from __future__ import annotations

from html import escape
from typing import Any

from transformers import TrainerState
from transformers.utils.notebook import NotebookProgressCallback

from grpo_trainer.monitor.charts import numbers_of


class NotebookView(NotebookProgressCallback):
    """Shows each log call's numbers, and an evaluation's rewards, in transformers' table."""

    def on_train_begin(self, args: Any, state: TrainerState, *more: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, *more, **kwargs)
        self.training_tracker.inner_table = None  # it has columns only for losses
        self.training_tracker.update(0)

    def on_log(
        self, args: Any, state: TrainerState, *_: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        if "loss" in logs:
            self._write(state, numbers_of(logs))

    def on_evaluate(
        self, args: Any, state: TrainerState, *_: Any, metrics: dict[str, float], **kwargs: Any
    ) -> None:
        """Show the rewards; outside training show nothing, since ``evaluate`` returns all
        metrics."""
        self.on_predict(args, state, *_)  # removes the evaluation's bar
        if self.training_tracker is not None:
            names = [name for name in metrics if name.endswith("_reward") and "/" not in name]
            self._write(state, {name: f"{metrics[name]:.3g}" for name in names})
            self.training_tracker.remove_child()
            self._force_next_update = True  # redraw the bar: evaluations are slow

    def _write(self, state: TrainerState, numbers: dict[str, str]) -> None:
        row = {"step": state.global_step} | {escape(name): x for name, x in numbers.items()}
        self.training_tracker.write_line(row)
        self.training_tracker.display()
