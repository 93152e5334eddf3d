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
from transformers import TrainerCallback, TrainerState

from grpo_trainer.common import unfailing
from grpo_trainer.monitor.charts import EVERY_CHART, WITHOUT_SIGNAL, nothing_to_learn
from grpo_trainer.monitor.completions import REWARD_PREFIX
from grpo_trainer.monitor.metrics import PHASES, token_rate

VIEW = "the view of the run"
_RUNTIME, _MEAN = "_runtime", "/mean"  # how names of metrics end
_LEAST_SHARE = 0.005  # of a step's time; below it a phase is not shown
_SPARK = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # of bars; as many of the latest rewards are shown
_COLOURS = ("blue", "cyan", "magenta", "yellow", "red", "green")  # of phases, in their order


class RunView(TrainerCallback):
    """Shows the numbers of a run as lines; in a terminal as a panel that stays at the bottom.

    Evaluations and the end have a line of their own. Only the main process shows.

    Args:
        console: where. Default: stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._live: Live | None = None  # the panel, from the first step to the last
        self._start = (0.0, 0)  # when this process began, and at which step
        self._row: dict[str, Any] = {}  # of the last log call
        self._rewards: list[float] = []
        self._left = ""  # time
        self._numbers: dict[str, str] = {}
        self._shares: dict[str, float] = {}  # phase -> part of the step's time

    def say(self, text: str) -> None:
        """Print a line, above the panel."""
        soft_wrap = not self._console.is_terminal
        self._console.print(text, highlight=False, markup=False, soft_wrap=soft_wrap)

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self._start = (time.perf_counter(), state.global_step)
        self._row = {"step": state.global_step, "num_tokens": state.num_input_tokens_seen}
        if not state.is_world_process_zero:
            return
        with unfailing(VIEW):
            if self._console.is_terminal:
                self._live = Live(console=self._console, get_renderable=lambda: self.picture(state))
                self._live.start()
            else:
                prompts = args.prompts_per_generation
                self.say(
                    f"{state.max_steps - state.global_step} steps, {prompts} prompt"
                    f"{'s' * (prompts != 1)} x {args.num_generations} completions at a time"
                )

    def on_log(
        self, args: Any, state: TrainerState, *_: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        step = state.global_step
        with unfailing(VIEW):
            if "loss" in logs:
                self.note(args, state, logs)
                if self._live is None:
                    told = [f"{name} {value}" for name, value in self._numbers.items()]
                    told += [f"{name} {share:.0%}" for name, share in self._shares.items()]
                    self.say("  ".join([f"step {step}/{state.max_steps}", *told, self._left]))
            if "train_runtime" in logs:
                self.say(
                    f"trained {step - self._start[1]} steps in {_time(logs['train_runtime'])}  "
                    f"mean loss {logs['train_loss']:.3g}"
                )
                self._say_without_signal(state)
            elif runtime := next((name for name in logs if name.endswith(_RUNTIME)), None):
                prefix = runtime.removesuffix(_RUNTIME)
                own = {name.removeprefix(f"{prefix}_"): value for name, value in logs.items()}
                told = [f"{name} {value}" for name, value in numbers_of(own).items()]
                self.say("  ".join([f"{prefix} step {step}", *told, _time(logs[runtime])]))

    def _say_without_signal(self, state: TrainerState) -> None:
        rows = state.log_history
        shares = [row[WITHOUT_SIGNAL] for row in rows if WITHOUT_SIGNAL in row]
        if nothing_to_learn(shares, {name for row in rows for name in row}):
            self.say(
                "every group had equal rewards, so nothing was learned: see the report, and "
                "with log_completions what was scored"
            )

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()
        self._live = None

    def note(self, args: Any, state: TrainerState, logs: dict[str, float]) -> None:
        """Keep what a log call of training says, to show it."""
        began, first = self._start
        seconds_per_step = (time.perf_counter() - began) / max(state.global_step - first, 1)
        self._left = f"{_time(seconds_per_step * (state.max_steps - state.global_step))} left"
        before, self._row = self._row, logs | {"step": state.global_step}
        if "reward" in logs:
            self._rewards = [*self._rewards, logs["reward"]][-_WIDTH:]
        self._numbers = numbers_of(logs)
        if (speed := token_rate(before, self._row)) is not None:
            self._numbers["tokens/s"] = f"{speed:,.0f}"
        if args.device.type == "cuda":
            memory = torch.cuda.max_memory_reserved(args.device)
        else:
            memory = psutil.Process().memory_info().rss
        self._numbers["memory"] = f"{memory / 2**30:.1f} GiB"
        total = logs.get("step_time", 0.0)
        shares = {name: logs.get(f"profiling/{name}", 0.0) / total for name in PHASES if total}
        self._shares = {name: share for name, share in shares.items() if share >= _LEAST_SHARE}

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
            parts += [Text(), Text.assemble("reward  ", (_sparkline(self._rewards), "green"))]
        if self._shares:
            bars, legend = Text("phases  "), Text("        ")
            for (name, share), colour in zip(self._shares.items(), _COLOURS, strict=False):
                bars.append("█" * round(share * _WIDTH), style=colour)
                legend.append("■ ", style=colour).append(f"{name} {share:.0%}  ")
            parts += [Text(), bars, legend]
        return Panel(Group(*parts), title="GRPO", title_align="left")


class RichProgressCallback(RunView):
    """The live view that every run shows by default, under TRL's name.

    In ``callbacks`` it is that one view. With ``disable_tqdm`` it is shown nevertheless.
    """


def _time(seconds: float) -> str:
    """Format as ``h:mm:ss``, after days if it takes any."""
    return str(timedelta(seconds=round(seconds)))


def _sparkline(values: list[float]) -> str:
    """Return one block per value, between the least and the greatest of them."""
    low, high = min(values), max(values)
    scale = (len(_SPARK) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARK[round((value - low) * scale)] for value in values)


def numbers_of(logs: dict[str, float]) -> dict[str, str]:
    """Return what charts have a label for; rewards of several functions stand behind their sum."""
    numbers: dict[str, str] = {}
    for chart in EVERY_CHART:
        name = chart.first(logs)
        if not chart.label or name is None:
            continue
        numbers[chart.label] = f"{logs[name]:.3g}"
        if name == "reward":
            if "reward_std" in logs:
                numbers["reward"] += f" \u00b1 {logs['reward_std']:.2g}"
            means = [n for n in logs if n.startswith(REWARD_PREFIX) and n.endswith(_MEAN)]
            if len(means) > 1:
                numbers |= {n.removesuffix(_MEAN): f"{logs[n]:.3g}" for n in means}
    return numbers
