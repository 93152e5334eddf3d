"""Overlap: the next generation batches are sampled while the current one trains."""

from __future__ import annotations

from collections import deque
from typing import Any

from grpo_trainer.data import PromptStream, Sample
from grpo_trainer.engines import Completions, Started
from grpo_trainer.experience.collector import Collector, prompts_of
from grpo_trainer.monitor import MetricLog, phase, value_metric


class BatchesAhead:
    """Draws the rows of the next generation batches, and has an engine start on them.

    They are begun in rounds of ``generation_batches_ahead``: when the completions of a round's last
    batch are there, the weights are sent and the next round is begun, before the policy trains on
    that batch. So the completions of a round come from the same weights, of which those of its
    first batch are one generation batch old when training on them begins, those of its last batch
    ``generation_batches_ahead``, and none are ever older.

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
        # where the prompts stood before its rows were drawn, the rows, and their completions
        self._begun: deque[tuple[dict[str, int], list[Sample], Started]] = deque()

    def take(self, left: int, metrics: MetricLog) -> list[Sample]:
        """Return this process's part of the next batch, after which training takes ``left`` more.

        With dynamic sampling the engine may be asked for more; otherwise it begins on the next
        round, if this was the last batch of one.
        """
        if not self._begun:
            self._begin(1)
        _, samples, started = self._begun.popleft()
        with phase("generate"):
            completions = started.result()
        if completions.logprobs is None:
            raise ValueError(
                "generation_batches_ahead: expected an engine that reports log-probabilities, by "
                "which the loss corrects for its older weights, got none"
            )
        age = float(self._sampler.step() - started.step)
        metrics.add(value_metric("sampling/staleness", age, self._args.device))
        if not self._args.dynamic_sampling:
            self.begin(left)
        self._collector.complete(samples, completions)
        return samples

    def begin(self, left: int) -> None:
        """Begin a round, if none waits, of at most the ``left`` batches that are trained on."""
        if not self._begun:
            self._begin(min(self._args.generation_batches_ahead, left))

    def state(self) -> list[dict[str, Any]]:
        """Wait for what was begun: a resumed run trains on the same completions."""
        return [
            {"before": before, "step": started.step, "completions": started.result()._asdict()}
            for before, _, started in self._begun
        ]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go on from there. The rows, which were drawn one after the other, are drawn again."""
        now = self._prompts.state()
        for batch in state:
            if not self._begun:
                self._prompts.restore(batch["before"])
            completions = Completions(**batch["completions"])
            started = Started(batch["step"], completions=completions)
            self._begun.append((batch["before"], self._draw(), started))
        if self._prompts.state() != now:  # with dynamic sampling others were drawn since
            self._prompts.restore(now)

    def _begin(self, count: int) -> None:
        for _ in range(count):
            before, samples = self._prompts.state(), self._draw()
            started = self._sampler.start(*prompts_of(samples))
            self._begun.append((before, samples, started))

    def _draw(self) -> list[Sample]:
        rows = self._collector.draw(self._prompts, self._args.prompts_per_generation)
        samples = self._collector.read(rows)
        self._sampler.context.encode(samples)
        return samples
