"""Overlap: the next generation batch is sampled while the current one trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerState

from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import Encoded, PromptStream, Row
from grpo_trainer.engines import Completions, Sampler, Started
from grpo_trainer.monitor import MetricLog, phase, value_metric


class Ahead:
    """Draws the rows of the next generation batch, and has an engine start on them.

    Training on a batch begins when its completions are there; by then the policy has trained on the
    batch before, which is how old the completions are: one generation batch, never more.

    Args:
        args: how long a batch serves, and where metrics are kept.
        prompts: the training prompts.
        draw: takes this process's rows of a generation batch from them.
        encode: the rows' prompts, encoded.
        rollouts: samples.

    Raises (in every method but ``stop``): what went wrong while the engine generated.
    """

    def __init__(
        self,
        args: GRPOConfig,
        prompts: PromptStream,
        draw: Callable[[], list[Row]],
        encode: Callable[[list[Row]], list[Encoded]],
        rollouts: Sampler,
    ) -> None:
        self._args = args
        self._prompts = prompts
        self._draw = draw
        self._encode = encode
        self._rollouts = rollouts
        self._rows: list[Row] = []
        self._started: Started | None = None
        self._before: dict[str, int] = {}  # where the prompts stood when the rows were drawn

    def take(self, state: TrainerState, metrics: MetricLog) -> tuple[list[Row], Completions]:
        """Return this process's part of the batch that was begun last, or else of the next one.

        With dynamic sampling the engine may be asked for more; otherwise it begins on the batch
        after that.
        """
        if self._started is None:
            self._begin()
        rows, started, self._started = self._rows, self._started, None
        assert started is not None
        with phase("generate"):
            completions = started.result()
        if completions.logprobs is None:
            raise ValueError(
                "overlap_generation: expected an engine that reports log-probabilities, by which "
                "the loss corrects for its older weights, got none"
            )
        age = float(state.global_step - started.step)
        metrics.add(value_metric("sampling/staleness", age, self._args.device))
        if not self._args.dynamic_sampling:
            self.begin(state)
        return rows, completions

    def begin(self, state: TrainerState) -> None:
        """Send the weights and start on the next rows, if training goes on for so long."""
        args = self._args
        steps = args.micro_steps_per_generation // args.gradient_accumulation_steps
        if state.global_step + steps < state.max_steps:
            self._begin()

    def stop(self) -> None:
        """End what was begun; its rows are not trained on."""
        self._started = None
        self._rollouts.cancel()

    def state(self) -> dict[str, Any] | None:
        """Wait for what was begun: a resumed run trains on the same completions."""
        if self._started is None:
            return None
        completions = self._started.result()._asdict()
        return {"before": self._before, "step": self._started.step, "completions": completions}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from there. The rows are drawn again from the prompts."""
        self._started = None
        if state is not None:
            self._before = state["before"]
            self._prompts.restore(self._before)
            self._rows = self._draw()
            completions = Completions(**state["completions"])
            self._started = self._rollouts.restored(completions, state["step"])

    def _begin(self) -> None:
        self._before = self._prompts.state()
        self._rows = self._draw()
        prompt_ids, images = map(list, zip(*self._encode(self._rows), strict=True))
        self._started = self._rollouts.start(prompt_ids, images)
