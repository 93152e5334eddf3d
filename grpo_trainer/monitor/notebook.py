"""What a notebook shows of a run; imported there alone, as transformers takes IPython for it."""

from __future__ import annotations

from html import escape
from typing import Any

from transformers import TrainerState
from transformers.utils.notebook import NotebookProgressCallback

from grpo_trainer.common import unfailing
from grpo_trainer.monitor.view import VIEW, numbers_of


class NotebookView(NotebookProgressCallback):
    """Shows the numbers of a run in the table under the bar, in place of the losses alone.

    A row has a log call, and the reward of an evaluation after the same step.
    """

    def on_train_begin(self, args: Any, state: TrainerState, *more: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, *more, **kwargs)
        self._rows: dict[int, dict[str, str]] = {}  # by step
        self.training_tracker.inner_table = None
        self.training_tracker.update(0)

    def on_log(
        self, args: Any, state: TrainerState, *_: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        if "loss" in logs:
            with unfailing(VIEW):
                self._show(state.global_step, numbers_of(logs))

    def on_evaluate(
        self, args: Any, state: TrainerState, *_: Any, metrics: dict[str, float], **kwargs: Any
    ) -> None:
        """Show the rewards; outside of training nothing, as ``evaluate`` returns all metrics."""
        with unfailing(VIEW):
            if self.training_tracker is None:
                self.on_predict(args, state, *_)  # takes the bar away
                return
            self.training_tracker.child_bar = self.prediction_bar = None
            self._force_next_update = True  # of the bar: evaluations take long
            rewards = {name: f"{metrics[name]:.3g}" for name in metrics if _is_reward(name)}
            self._show(state.global_step, rewards)

    def _show(self, step: int, numbers: dict[str, str]) -> None:
        self._rows.setdefault(step, {"step": str(step)}).update(numbers)
        rows = self._rows.values()
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = [[row.get(name, "") for name in names] for row in rows]
        self.training_tracker.inner_table = [list(map(escape, names)), *table]
        self.training_tracker.display()


def _is_reward(name: str) -> bool:
    """Return whether it is the reward of an evaluation, whatever that is called."""
    return name.endswith("_reward") and "/" not in name
