"""A progress bar that shows what matters in RL: reward, KL and speed."""

from __future__ import annotations

import time
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RewardProgress(TrainerCallback):
    """One bar on the main process, updated per step; its numbers change when metrics are logged."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._last = (0.0, 0.0)  # seconds, tokens at the previous log call

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True
            )
            self._last = (time.perf_counter(), state.num_input_tokens_seen)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        if self._bar is None or "num_tokens" not in logs:
            return
        now, tokens = time.perf_counter(), logs["num_tokens"]
        seconds, before = now - self._last[0], self._last[1]
        self._last = (now, tokens)
        shown: dict[str, str] = {
            name: f"{logs[name]:.3g}" for name in ("reward", "kl") if name in logs
        }
        shown["tok/s"] = f"{(tokens - before) / max(seconds, 1e-9):.0f}"
        self._bar.set_postfix(shown)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
