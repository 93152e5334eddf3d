"""What a run leaves to look at: metrics and completions, and the card of each saved model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from grpo_trainer.common import unfailing
from grpo_trainer.config import GRPOConfig
from grpo_trainer.monitor.card import CARD_NAME, may_write, write_card
from grpo_trainer.monitor.completions import (
    EVAL_PREFIX,
    CompletionLog,
    set_earlier_aside,
)
from grpo_trainer.monitor.metrics import MetricLog, doubt_of_logprobs

logger = logging.getLogger(__name__)


class LogsRun(Trainer):
    """Adds to each row of the log what was collected since the one before, and writes cards."""

    args: GRPOConfig
    # of training (True) and of evaluations (False)
    _metrics: dict[bool, MetricLog]
    _completions: dict[bool, CompletionLog]  # empty unless they are asked for
    _has_doubted = False  # the log-probabilities of the engine, in a warning

    def start_logs(self) -> None:
        """Drop what was collected."""
        self._metrics = {True: MetricLog(self.accelerator), False: MetricLog(self.accelerator)}
        self._completions = {}
        if self.args.log_completions:
            evaluations = CompletionLog(self.args, EVAL_PREFIX)
            self._completions = {True: CompletionLog(self.args), False: evaluations}

    def _inner_training_loop(
        self, *args: Any, resume_from_checkpoint: str | None = None, **kwargs: Any
    ) -> TrainOutput:
        starts_over = resume_from_checkpoint is None
        if self._completions and starts_over and self.is_world_process_zero():
            set_earlier_aside(self.args)
        return super()._inner_training_loop(
            *args, resume_from_checkpoint=resume_from_checkpoint, **kwargs
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # a training step's row, or the summary, which has what came after the last of these
        if "loss" in logs or "train_loss" in logs:
            if drained := self._metrics[True].drain():
                logs |= drained | {"num_tokens": self.state.num_input_tokens_seen}
                self._doubt(drained)
            self._write_completions(training=True)
        super().log(logs, start_time)

    def _doubt(self, row: dict[str, float]) -> None:
        """Warn once of impossible log-probabilities that the loss goes by."""
        loss = self.loss_config
        used = loss.correction_mode or loss.bypasses or loss.off_policy_mask_threshold is not None
        if not used or self._has_doubted or not self.is_world_process_zero():
            return
        doubt = doubt_of_logprobs(row, self.rollouts.sampling.most_gain)
        if doubt is not None:
            self._has_doubted = True
            logger.warning(
                "log-probabilities: the engine, or rollout_func, reports %s. The loss weights "
                "tokens by this ratio, so little of the gradient may be left",
                doubt,
            )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        self._write_completions(training=False)
        drained = self._metrics[False].drain() | {"num_tokens": self.state.num_input_tokens_seen}
        output.metrics.update({f"{prefix}_{name}": value for name, value in drained.items()})
        return output

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.control.should_training_stop:  # a longer run would write them once more
            self._write_completions(training=True)
        super()._save_checkpoint(model, trial)

    def _write_completions(self, training: bool) -> None:
        if self._completions:
            step = self.state.global_step
            self._completions[training].flush(step, self.is_world_process_zero())

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        path = Path(output_dir or self.args.output_dir) / CARD_NAME
        is_ours = may_write(path)  # asked first: peft leaves a card of its own
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            with unfailing(f"card of {self.args.output_dir}"):
                write_card(self, path, is_ours)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write the card before an upload; ``push_to_hub`` hands these on.

        They are its title, by default the name of ``output_dir``; hub ids of what was trained on,
        by default the dataset as it was named; and more tags.
        """
        if self.is_world_process_zero():
            path = Path(self.args.output_dir) / CARD_NAME
            datasets, more = (
                [each] if isinstance(each, str) else list(each or ())
                for each in (dataset_name, tags)
            )
            write_card(self, path, may_write(path), name=model_name, datasets=datasets, tags=more)
