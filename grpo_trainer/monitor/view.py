"""What a run says while it goes on: one line per log call, or a view that fills a terminal."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import psutil
import torch
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerState

from grpo_trainer.common import unfailing
from grpo_trainer.monitor.charts import EVERY_CHART
from grpo_trainer.monitor.completions import REWARD_PREFIX
from grpo_trainer.monitor.metrics import PHASES, token_rate

_WHAT = "the view of the run"
_RUNTIME, _MEAN = "_runtime", "/mean"  # how names of metrics end
_LEAST_SHARE = 0.005  # of a step's time; below it a phase is not shown
_SPARK = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # of bars; as many of the latest rewards are shown
_COLOURS = ("blue", "cyan", "magenta", "yellow", "red", "green")  # of phases, in their order


class RunView(TrainerCallback):
    """Shows the numbers of a run as lines; in a terminal as a panel that stays at the bottom.

    Evaluations and the end have a line of their own. Only the main process shows.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None  # the panel, from the first step to the last
        self._start = (0.0, 0)  # when this process began, and at which step
        self._before: dict[str, Any] = {}  # step and tokens of the last log call
        self._rewards: list[float] = []
        self._left = ""  # the time
        self._numbers: dict[str, str] = {}  # of the last log call
        self._shares: dict[str, float] = {}  # phase -> part of the step's time

    def say(self, text: str) -> None:
        """Print a line, above the panel."""
        soft_wrap = not self._console.is_terminal
        self._console.print(text, highlight=False, markup=False, soft_wrap=soft_wrap)

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self._start = (time.perf_counter(), state.global_step)
        self._before = {"step": state.global_step, "num_tokens": state.num_input_tokens_seen}
        if state.is_world_process_zero and self._console.is_terminal:
            with unfailing(_WHAT):
                self._live = Live(console=self._console, get_renderable=lambda: self.picture(state))
                self._live.start()

    def on_log(
        self, args: Any, state: TrainerState, *_: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        step = state.global_step
        with unfailing(_WHAT):
            if "loss" in logs:
                self.note(args, state, logs)
                if self._live is None:
                    self.say("  ".join(self._line(state)))
            if "train_runtime" in logs:
                self.say(
                    f"trained {step - self._start[1]} steps in {duration(logs['train_runtime'])}  "
                    f"mean loss {logs['train_loss']:.3g}"
                )
            elif runtime := next((name for name in logs if name.endswith(_RUNTIME)), None):
                self.say(evaluation_line(runtime.removesuffix(_RUNTIME), step, logs))

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()
        self._live = None

    def note(self, args: Any, state: TrainerState, logs: dict[str, float]) -> None:
        """Keep what a log call of training says, to show it."""
        began, first = self._start
        seconds_per_step = (time.perf_counter() - began) / max(state.global_step - first, 1)
        left = duration(seconds_per_step * (state.max_steps - state.global_step))
        row = logs | {"step": state.global_step}
        speed, self._before = token_rate(self._before, row), row
        numbers = _numbers(logs)
        if "reward" in logs:
            self._rewards = [*self._rewards, logs["reward"]][-_WIDTH:]
        if speed is not None:
            numbers["tokens/s"] = f"{speed:,.0f}"
        numbers["memory"] = f"{_memory(args.device) / 2**30:.1f} GiB"
        self._left, self._numbers, self._shares = f"{left} left", numbers, _shares(logs)

    def _line(self, state: TrainerState) -> list[str]:
        numbers = [f"{name} {value}" for name, value in self._numbers.items()]
        shares = [f"{name} {share:.0%}" for name, share in self._shares.items()]
        return [f"step {state.global_step}/{state.max_steps}", *numbers, *shares, self._left]

    def picture(self, state: TrainerState) -> RenderableType:
        """Return the panel as it is now."""
        step, steps = state.global_step, state.max_steps
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=steps, completed=step, width=_WIDTH)
        head.add_row(Text(f"step {step}/{steps}", style="bold"), bar, Text(self._left))
        parts: list[RenderableType] = [head]
        if self._numbers:
            texts = [Text.assemble((f"{n} ", "dim"), (x, "bold")) for n, x in self._numbers.items()]
            parts += [Text(), Columns(texts, padding=(0, 3))]
        if len(self._rewards) > 1:
            parts += [Text(), Text.assemble("reward  ", (sparkline(self._rewards), "green"))]
        if self._shares:
            parts += [Text(), _phases(self._shares)]
        return Panel(Group(*parts), title="GRPO", title_align="left")


def show_progress(trainer: Trainer, console: Console | None = None) -> None:
    """Replace the bar of transformers by a view.

    A notebook keeps its own table, and nothing is shown with ``disable_tqdm``.
    """
    if any(type(item) is ProgressCallback for item in trainer.callback_handler.callbacks):
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(RunView(console or Console(file=sys.stderr)))


def close_progress(trainer: Trainer) -> None:
    """Give the terminal back, however training has ended."""
    for item in trainer.callback_handler.callbacks:
        if isinstance(item, RunView):
            item.close()


def evaluation_line(prefix: str, step: int, logs: dict[str, float]) -> str:
    """Return the result of an evaluation, whose metrics begin with ``prefix``."""
    start = f"{prefix}_"
    own = {name.removeprefix(start): at for name, at in logs.items() if name.startswith(start)}
    numbers = [f"{name} {value}" for name, value in _numbers(own).items()]
    return "  ".join([f"{prefix} step {step}", *numbers, duration(own["runtime"])])


def duration(seconds: float) -> str:
    """Format as ``h:mm:ss``, after days if it takes any."""
    return str(timedelta(seconds=round(seconds)))


def sparkline(values: list[float]) -> str:
    """Return one block per value, between the least and the greatest of them."""
    low, high = min(values), max(values)
    scale = (len(_SPARK) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARK[round((value - low) * scale)] for value in values)


def _numbers(logs: dict[str, float]) -> dict[str, str]:
    """Return what charts have a label for; rewards of several functions stand behind their sum."""
    first = {chart.label: chart.first(logs) for chart in EVERY_CHART if chart.label}
    numbers = {label: f"{logs[name]:.3g}" for label, name in first.items() if name is not None}
    if "reward" not in numbers:
        return numbers
    if "reward_std" in logs:
        numbers["reward"] += f" \u00b1 {logs['reward_std']:.2g}"
    total = {"reward": numbers.pop("reward")}
    functions = [name for name in logs if name.startswith(REWARD_PREFIX) and name.endswith(_MEAN)]
    if len(functions) > 1:
        total |= {name.removesuffix(_MEAN): f"{logs[name]:.3g}" for name in functions}
    return total | numbers


def _shares(logs: dict[str, float]) -> dict[str, float]:
    total = logs.get("step_time", 0.0)
    shares = {name: logs.get(f"profiling/{name}", 0.0) / total for name in PHASES if total}
    return {name: share for name, share in shares.items() if share >= _LEAST_SHARE}


def _memory(device: torch.device) -> int:
    """Return bytes: the accelerator's peak, else what of this process is resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return psutil.Process().memory_info().rss


def _phases(shares: dict[str, float]) -> Text:
    """Return a bar of the step's time, and what its colours mean."""
    text = Text("phases  ")
    legend = Text("\n        ")
    for (name, share), colour in zip(shares.items(), _COLOURS, strict=False):
        text.append("█" * round(share * _WIDTH), style=colour)
        legend.append("■ ", style=colour)
        legend.append(f"{name} {share:.0%}  ")
    return text + legend
