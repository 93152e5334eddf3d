"""The live view of a run: a progress bar in a terminal, elsewhere a line per log call."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerState

from grpo_trainer.common import unfailing
from grpo_trainer.monitor.charts import WITHOUT_SIGNAL, nothing_to_learn, numbers_of
from grpo_trainer.monitor.metrics import PHASES, token_rate

_RUNTIME = "_runtime"  # the end of the name of one metric of each evaluation
_LEAST_SHARE = 0.005  # phases below this share of a step's time are not shown


class _Bar(Progress):
    """A progress bar, and below it the metrics and phases of the last log call."""

    numbers: Sequence[str] = ()
    phases: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Columns(map(Text, self.numbers), padding=(0, 2))
        yield Text("  ".join(self.phases))


class RichProgressCallback(TrainerCallback):
    """Shows a run's metrics below a progress bar, or as lines if there is no terminal.

    Evaluations and the end of the run get their own lines. Only the main process shows anything.
    Every run has this view by default; an instance in ``callbacks`` is shown even with
    ``disable_tqdm``.

    Args:
        console: shows the view. Default: stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(file=sys.stderr)
        self.bar = _Bar(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=math.inf,  # the default is shorter than many steps
        )
        self._task = self.bar.add_task("")

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self._first_step = state.global_step
        self.bar.reset(self._task, total=state.max_steps, completed=state.global_step)
        if state.is_world_process_zero:
            with unfailing("the view of the run"):
                self.bar.start()

    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self.bar.update(self._task, completed=state.global_step)

    def on_log(
        self, args: Any, state: TrainerState, *_: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        with unfailing("the view of the run"):
            if "loss" in logs:
                self._show_step(state, logs)
            if "train_runtime" in logs:
                self._show_end(state, logs)
            elif runtime := next((name for name in logs if name.endswith(_RUNTIME)), None):
                prefix = runtime.removesuffix(_RUNTIME)
                own = {name.removeprefix(f"{prefix}_"): value for name, value in logs.items()}
                step = f"{prefix} step {state.global_step}"
                self._say(step, *_pairs(numbers_of(own)), _time(logs[runtime]))

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Release the terminal."""
        self.bar.stop()

    def _show_step(self, state: TrainerState, logs: dict[str, float]) -> None:
        numbers = numbers_of(logs)
        rows = [row for row in state.log_history if "num_tokens" in row][-2:]
        if len(rows) == 2 and (speed := token_rate(*rows)) is not None:
            numbers["tokens/s"] = f"{speed:,.0f}"
        if memory := torch.cuda.max_memory_reserved():
            numbers["memory"] = f"{memory / 2**30:.1f} GiB"
        total = logs.get("step_time", 0.0)
        shares = {name: logs.get(f"profiling/{name}", 0.0) / total for name in PHASES if total}
        phases = {name: f"{share:.0%}" for name, share in shares.items() if share >= _LEAST_SHARE}
        self.bar.numbers, self.bar.phases = _pairs(numbers), _pairs(phases)
        if self.bar.disable:
            seconds = self.bar.tasks[0].time_remaining
            left = [] if seconds is None else [f"{_time(seconds)} left"]
            step = f"step {state.global_step}/{state.max_steps}"
            self._say(step, *self.bar.numbers, *self.bar.phases, *left)

    def _show_end(self, state: TrainerState, logs: dict[str, float]) -> None:
        steps, time = state.global_step - self._first_step, _time(logs["train_runtime"])
        self._say(f"trained {steps} steps in {time}", f"mean loss {logs['train_loss']:.3g}")
        shares = [row[WITHOUT_SIGNAL] for row in state.log_history if WITHOUT_SIGNAL in row]
        if nothing_to_learn(shares, {name for row in state.log_history for name in row}):
            self._say(
                "every group had equal rewards, so nothing was learned: see the report, and set "
                "log_completions to see the scored completions"
            )

    def _say(self, *words: str) -> None:
        """Print a line, above the bar."""
        self.bar.console.print(Text("  ".join(words)), soft_wrap=self.bar.disable)


def show_progress(trainer: Trainer) -> None:
    """Replace transformers' progress bar, or its table in a notebook, with a view.

    With ``disable_tqdm`` nothing is shown. A view in the callbacks takes precedence.
    """
    callbacks = list(trainer.callback_handler.callbacks)
    for item in callbacks:
        if type(item) is ProgressCallback:
            trainer.remove_callback(item)
            if not any(isinstance(other, RichProgressCallback) for other in callbacks):
                trainer.add_callback(RichProgressCallback())
        elif type(item).__name__ == "NotebookProgressCallback":  # importing it needs IPython
            from grpo_trainer.monitor.notebook import NotebookView

            trainer.remove_callback(item)
            trainer.add_callback(NotebookView())


def close_progress(trainer: Trainer) -> None:
    """Release the terminal, however training ended."""
    for item in trainer.callback_handler.callbacks:
        if isinstance(item, RichProgressCallback):
            item.on_train_end()


def _time(seconds: float) -> str:
    """Format as ``h:mm:ss``, with days before it if there are any."""
    return str(timedelta(seconds=round(seconds)))


def _pairs(numbers: dict[str, str]) -> list[str]:
    return [f"{name} {value}" for name, value in numbers.items()]
