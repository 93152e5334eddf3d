"""Overlap: the next generation batches are sampled while the current one trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from grpo_trainer.data import Prompts, Sample, Scored
from grpo_trainer.engines import Completions, Started
from grpo_trainer.experience.single_turn import SingleTurn, prompts_of
from grpo_trainer.monitor import log_value, phase


class BatchesAhead(Prompts):
    """Draws the prompts of the next generation batches, and has an engine start on them.

    They are begun in rounds of ``generation_batches_ahead``: when the completions of a round's last
    batch are there, the weights are sent and the next round is begun, before the policy trains on
    that batch. So the completions of a round come from the same weights, of which those of its
    first batch are one generation batch old when training on them begins, those of its last batch
    ``generation_batches_ahead``, and none are ever older.

    With dynamic sampling the engine completes further prompts first, and the next round is begun
    when the batch is scored.

    Args:
        prompts: the training prompts.
        engine: completes them.
        batches_left: how many generation batches training takes after the current one.

    Raises (in every method): what went wrong while the engine generated.
    """

    def __init__(
        self, prompts: Prompts, engine: SingleTurn, batches_left: Callable[[], int]
    ) -> None:
        self._prompts = prompts
        self._engine = engine
        self._batches_left = batches_left
        self._args = engine.sampler.context.args
        self._has_batch = False  # what else is asked for are further prompts of this batch
        # where the prompts stood before its samples were drawn, these, and their completions
        self._begun: deque[tuple[Any, list[Sample], Started]] = deque()

    def next(self, count: int) -> list[Sample]:
        """Return completed samples; further ones of the same generation batch are not."""
        if self._has_batch:
            return self._prompts.next(count)
        self._has_batch = True
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
        log_value("sampling/staleness", float(self._engine.sampler.step() - started.step))
        if not self._args.dynamic_sampling:
            self._begin_round()
        self._engine.complete(samples, completions)
        return samples

    def scored(self, batch: Scored) -> None:
        self._has_batch = False
        if self._args.dynamic_sampling:
            self._begin_round()
        self._prompts.scored(batch)

    def state(self) -> dict[str, Any]:
        """Wait for what was begun: a resumed run trains on the same completions."""
        begun = [
            {"before": before, "step": started.step, "completions": started.result()._asdict()}
            for before, _, started in self._begun
        ]
        return {"prompts": self._prompts.state(), "begun": begun}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there. The rows, which were drawn one after the other, are drawn again."""
        for batch in state["begun"]:
            if not self._begun:
                self._prompts.restore(batch["before"])
            completions = Completions(**batch["completions"])
            started = Started(batch["step"], completions=completions)
            self._begun.append((batch["before"], self._drawn(), started))
        if self._prompts.state() != state["prompts"]:  # dynamic sampling has drawn others since
            self._prompts.restore(state["prompts"])

    def _begin_round(self) -> None:
        """Begin a round, if none waits, of no more batches than are trained on."""
        if not self._begun:
            self._begin(min(self._args.generation_batches_ahead, self._batches_left()))

    def _begin(self, count: int) -> None:
        for _ in range(count):
            before, samples = self._prompts.state(), self._drawn()
            prompt_ids, images = prompts_of(samples)
            self._begun.append((before, samples, self._engine.sampler.start(prompt_ids, images)))

    def _drawn(self) -> list[Sample]:
        samples = self._prompts.next(self._args.prompts_per_generation)
        self._engine.sampler.context.encode(samples)
        return samples
