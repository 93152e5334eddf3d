"""Overlap: the next generation batch is sampled while the current one trains."""

from __future__ import annotations

from typing import Any

from transformers import TrainerState

from grpo_trainer.data import PromptStream, Sample
from grpo_trainer.engines import Completions, Started
from grpo_trainer.experience.collector import Collector, prompts_of
from grpo_trainer.monitor import MetricLog, phase, value_metric


class NextBatch:
    """Draws the rows of the next generation batch, and has an engine start on them.

    Training on a batch begins when its completions are there; by then the policy has trained on the
    batch before, which is how old the completions are: one generation batch, never more.

    Args:
        prompts: the training prompts.
        collector: draws this process's rows from them.

    Raises (in every method): what went wrong while the engine generated.
    """

    def __init__(self, prompts: PromptStream, collector: Collector) -> None:
        self._prompts = prompts
        self._collector = collector
        self._sampler = collector.sampler
        self._args = self._sampler.context.args
        self._samples: list[Sample] = []
        self._before: dict[str, int] = {}  # where the prompts stood when the rows were drawn

    def take(self, state: TrainerState, metrics: MetricLog) -> list[Sample]:
        """Return this process's part of the batch that was begun last, or else of the next one.

        With dynamic sampling the engine may be asked for more; otherwise it begins on the batch
        after that.
        """
        if self._sampler.running is None:
            self._begin()
        started, self._sampler.running = self._sampler.running, None
        assert started is not None
        samples = self._samples
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
        self._collector.complete(samples, completions)
        return samples

    def begin(self, state: TrainerState) -> None:
        """Send the weights and start on the next rows, if training goes on for so long."""
        args = self._args
        steps = args.micro_steps_per_generation // args.gradient_accumulation_steps
        if state.global_step + steps < state.max_steps:
            self._begin()

    def state(self) -> dict[str, Any] | None:
        """Wait for what was begun: a resumed run trains on the same completions."""
        started = self._sampler.running
        if started is None:
            return None
        completions = started.result()._asdict()
        return {"before": self._before, "step": started.step, "completions": completions}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from there. The rows are drawn again from the prompts."""
        if state is not None:
            self._prompts.restore(state["before"])
            self._draw()
            completions = Completions(**state["completions"])
            self._sampler.running = Started(state["step"], completions=completions)

    def _begin(self) -> None:
        self._draw()
        self._sampler.start(*prompts_of(self._samples))

    def _draw(self) -> None:
        self._before = self._prompts.state()
        rows = self._collector.draw(self._prompts, self._args.prompts_per_generation)
        self._samples = self._collector.read(rows)
        self._sampler.context.encode(self._samples)
