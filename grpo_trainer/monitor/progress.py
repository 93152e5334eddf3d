"""What a run says while it goes on: one line per log call, or a view that fills a terminal."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import psutil
import torch
from rich.console import Console
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from grpo_trainer.common import unfailing
from grpo_trainer.monitor.completions import REWARD_PREFIX
from grpo_trainer.monitor.metrics import PHASES, token_rate

# metric -> how it is called here; the first that a run logs stand in this order
SHOWN = {
    "reward": "reward",
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clipped",
    "cispo_clip_ratio": "clipped",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "cut off",
    "tools/call_frequency": "tool calls",
    "loss": "loss",
    "grad_norm": "gradient",
}


_RUNTIME, _MEAN = "_runtime", "/mean"  # how names of metrics end
_WHAT = "the view of the run"
_LEAST_SHARE = 0.005  # of a step's time; below it a phase is not shown


class Snapshot(NamedTuple):
    """The latest numbers of a run."""

    step: int
    steps: int  # in all
    seconds_left: float
    numbers: dict[str, str]
    tokens_per_second: float | None
    memory_bytes: int  # peak of the accelerator, else resident memory of this process
    shares: dict[str, float]  # phase -> part of the step's time


class Progress(TrainerCallback):
    """Collects what is logged and shows it; subclasses say how. Only the main process shows."""

    def __init__(self) -> None:
        self._start = (0.0, 0)  # when this process began, and at which step
        self._before: dict[str, Any] = {}  # step and tokens of the last log call

    def show(self, snapshot: Snapshot) -> None:
        """Show the numbers of a log call of training."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Print the result of an evaluation, and at the end that of the run."""
        raise NotImplementedError

    def step(self, step: int, steps: int) -> None:
        """Note an optimizer step."""

    def open(self, step: int, steps: int) -> None:
        """Begin, before the first step."""

    def close(self) -> None:
        """End, also after an error; it may be called more than once."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        self._start = (time.perf_counter(), state.global_step)
        self._before = {"step": state.global_step, "num_tokens": state.num_input_tokens_seen}
        if state.is_world_process_zero:
            with unfailing(_WHAT):
                self.open(state.global_step, state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            with unfailing(_WHAT):
                self.step(state.global_step, state.max_steps)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        with unfailing(_WHAT):
            if "loss" in logs:
                self.show(self._snapshot(args, state, logs))
            for prefix in _evaluations(logs):
                self.say(evaluation_line(prefix, state.global_step, logs))
            if "train_runtime" in logs:
                self.say(summary_line(state.global_step - self._start[1], logs))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self.close()

    def _snapshot(
        self, args: TrainingArguments, state: TrainerState, logs: dict[str, float]
    ) -> Snapshot:
        began, first = self._start
        seconds_per_step = (time.perf_counter() - began) / max(state.global_step - first, 1)
        row = logs | {"step": state.global_step}
        speed = token_rate(self._before, row)
        self._before = row
        return Snapshot(
            step=state.global_step,
            steps=state.max_steps,
            seconds_left=seconds_per_step * (state.max_steps - state.global_step),
            numbers=_numbers(logs),
            tokens_per_second=speed,
            memory_bytes=_memory(args.device),
            shares=_shares(logs),
        )


class PlainProgress(Progress):
    """One line per log call, for files and pipes."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def show(self, snapshot: Snapshot) -> None:
        self.say(line(snapshot))

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def line(snapshot: Snapshot) -> str:
    """Return the numbers in a row."""
    parts = [f"step {snapshot.step}/{snapshot.steps}"]
    parts += [f"{name} {value}" for name, value in snapshot.numbers.items()]
    if snapshot.tokens_per_second is not None:
        parts.append(f"{snapshot.tokens_per_second:,.0f} tok/s")
    parts.append(gibibytes(snapshot.memory_bytes))
    parts += [f"{name} {share:.0%}" for name, share in snapshot.shares.items()]
    parts.append(f"{duration(snapshot.seconds_left)} left")
    return "  ".join(parts)


def evaluation_line(prefix: str, step: int, logs: dict[str, float]) -> str:
    """Return the result of an evaluation, whose metrics begin with ``prefix``."""
    start = f"{prefix}_"
    own = {name.removeprefix(start): at for name, at in logs.items() if name.startswith(start)}
    numbers = [f"{name} {value}" for name, value in _numbers(own).items()]
    return "  ".join([f"{prefix} step {step}", *numbers, duration(own["runtime"])])


def summary_line(steps: int, logs: dict[str, float]) -> str:
    """Return what the steps of this process came to."""
    return (
        f"trained {steps} steps in {duration(logs['train_runtime'])}  "
        f"mean loss {logs['train_loss']:.3g}"
    )


def duration(seconds: float) -> str:
    """Format as ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def close_progress(trainer: Trainer) -> None:
    """Give the terminal back, however training has ended."""
    for item in trainer.callback_handler.callbacks:
        if isinstance(item, Progress):
            item.close()


def _evaluations(logs: dict[str, float]) -> list[str]:
    """Return the prefixes of the evaluations, one in each row of an evaluation."""
    found = [name.removesuffix(_RUNTIME) for name in logs if name.endswith(_RUNTIME)]
    return [prefix for prefix in found if prefix != "train"]


def _numbers(logs: dict[str, float]) -> dict[str, str]:
    shown = {label: f"{logs[name]:.3g}" for name, label in SHOWN.items() if name in logs}
    if "reward" not in shown:
        return shown
    if "reward_std" in logs:
        shown["reward"] += f" \u00b1 {logs['reward_std']:.2g}"
    total = {"reward": shown.pop("reward")}
    functions = [name for name in logs if name.startswith(REWARD_PREFIX) and name.endswith(_MEAN)]
    if len(functions) > 1:
        total |= {name.removesuffix(_MEAN): f"{logs[name]:.3g}" for name in functions}
    return total | shown


def _shares(logs: dict[str, float]) -> dict[str, float]:
    total = logs.get("step_time", 0.0)
    seconds = {name: logs.get(f"profiling/{name}", 0.0) for name in PHASES}
    shares = {name: value / total for name, value in seconds.items() if total}
    return {name: share for name, share in shares.items() if share >= _LEAST_SHARE}


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return psutil.Process().memory_info().rss
