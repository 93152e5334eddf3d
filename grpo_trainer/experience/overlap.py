"""Overlap: sample the next completions while the policy trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn import functional

from grpo_kernels.losses import Metrics, Stat
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import Prompts, Sample, Scored, check_plain
from grpo_trainer.engines import Completions, Sampler, Source, raise_on_all
from grpo_trainer.experience.completed import any_process
from grpo_trainer.experience.single_turn import SingleTurn
from grpo_trainer.monitor import log_metrics, phase


@dataclass(eq=False)
class Part:
    """Samples that are completed together: a group, or a whole draw."""

    samples: list[Sample]
    place: int  # of its first sample in the draw
    work: Future[list[Metrics]] | None = None  # in the background; None: not started
    metrics: Metrics | None = None  # set when it is complete

    @property
    def done(self) -> bool:
        return self.metrics is not None or (self.work is not None and self.work.done())

    @property
    def failed(self) -> bool:
        work = self.work
        return work is not None and work.done() and (work.cancelled() or bool(work.exception()))

    @property
    def begun(self) -> bool:
        return self.metrics is not None or self.work is not None


@dataclass(eq=False)
class Draw:
    """Prompts that were drawn together."""

    before: Any  # the state of the prompts before the draw
    count: int  # of prompts, on all processes
    parts: list[Part]  # not trained on yet


class Ahead(Prompts):
    """Draws the next prompts early, and lets a source complete them in the background.

    Args:
        prompts: the training prompts.
        source: completes them.
        sampler: sends the weights that the source samples with.
        batches_left: returns the number of generation batches after the current one.

        Raises (in every method): errors from the background.
    """

    def __init__(
        self,
        prompts: Prompts,
        source: Source,
        sampler: Sampler,
        batches_left: Callable[[], int],
    ) -> None:
        self._prompts = prompts
        self._source = source
        self._sampler = sampler
        self._batches_left = batches_left
        self._args: GRPOConfig = sampler.context.args
        self._accelerator: Accelerator = sampler.context.accelerator
        self._draws: list[Draw] = []  # draws with samples that were not trained on yet

    def scored(self, batch: Scored) -> None:
        self._prompts.scored(batch)

    def state(self) -> dict[str, Any]:
        """Wait for pending completions, so that a resumed run trains on the same ones.

        Completions that a checkpoint cannot hold are left out; a resumed run samples them again.
        """
        parts = [part for draw in self._draws for part in draw.parts]
        self._wait(parts)
        return {
            "prompts": self._prompts.state(),
            "draws": [
                {
                    "before": draw.before,
                    "count": draw.count,
                    "parts": [_state(part) for part in draw.parts],
                }
                for draw in self._draws
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state. The same rows are drawn again, in order."""
        for batch in state.get("begun", ()):
            self._restore_begun(**batch)
        for saved in state.get("draws", ()):
            if self._prompts.state() != saved["before"]:
                self._prompts.restore(saved["before"])
            draw = Draw(saved["before"], saved["count"], [])
            samples = self._prompts.next(draw.count)
            for one in saved["parts"]:
                own = samples[one["place"] : one["place"] + one["size"]]
                draw.parts.append(self._restored(own, **one))
            self._draws.append(draw)
        if self._prompts.state() != state["prompts"]:  # more were drawn since
            self._prompts.restore(state["prompts"])

    def _restore_begun(self, before: Any, step: int, completions: dict[str, Any]) -> None:
        """Continue from a generation batch of version 1.0.0, which made one request for it."""
        if self._prompts.state() != before:
            self._prompts.restore(before)
        self._draw(self._args.prompts_per_generation)
        [part] = self._draws[-1].parts
        assert isinstance(self._source, SingleTurn)  # the only source that version had
        self._sampler.context.encode(part.samples)
        rows = Completions(**completions)
        versions = [[step] * len(ids) for ids in rows.token_ids]
        self._source.add(part.samples, rows._replace(versions=versions))
        part.metrics = Metrics({})

    def _restored(
        self, samples: list[Sample], place: int, size: int, completed: Any, metrics: Any
    ) -> Part:
        if completed is None:
            return Part(samples, place)
        if isinstance(self._source, SingleTurn):  # adds other model inputs of prompts
            self._sampler.context.encode(samples)
        for sample, fields in zip(samples, completed, strict=True):
            sample.restore_completed(fields)
            sample.inputs |= sample.columns
        stats = {name: Stat(*fields) for name, fields in metrics.items()}
        return Part(samples, place, metrics=Metrics(stats))

    def _draw(self, count: int, size: int | None = None) -> None:
        """Draw ``count`` prompts, in parts of ``size`` samples; None: in one part."""
        before, samples = self._prompts.state(), self._prompts.next(count)
        size = size or len(samples)
        parts = [Part(samples[i : i + size], i) for i in range(0, len(samples), size)]
        self._draws.append(Draw(before, count, parts))

    def _begin(self) -> None:
        """Start completing the drawn prompts with the engine's weights."""
        for part in (part for draw in self._draws for part in draw.parts):
            if not part.begun:
                part.work = self._sampler.start(self._source.ahead(part.samples))

    def _taken(self, parts: Sequence[Part]) -> list[Sample]:
        """Return the samples of complete ``parts``, for training."""
        self._wait(parts)
        for draw in self._draws:
            draw.parts = [part for part in draw.parts if part not in parts]
        self._draws = [draw for draw in self._draws if draw.parts]
        log_metrics(Metrics.merge([part.metrics for part in parts if part.metrics is not None]))
        samples = [sample for part in parts for sample in part.samples]
        self._leave_out_old(samples)
        return samples

    def _wait(self, parts: Sequence[Part]) -> None:
        """Wait until ``parts`` are complete; every process calls it with its own parts."""
        error: Exception | None = None
        for part in parts:
            if part.metrics is None and part.work is not None:
                try:
                    [part.metrics] = part.work.result()
                except Exception as failure:
                    error = error or failure
        raise_on_all(self._accelerator, error)

    def _leave_out_old(self, samples: Sequence[Sample]) -> None:
        """Log the age of the policy's tokens, and leave out tokens that are too old."""
        step, most = self._sampler.step(), self._args.max_staleness
        ages = [
            step - version
            for sample in samples
            for version, own in zip(sample.rollout_versions or (), sample.by_policy, strict=True)
            if own
        ]
        table = torch.tensor(ages, dtype=torch.float64, device=self._accelerator.device)
        count = torch.full_like(table.sum(), len(ages))
        stats = {
            "sampling/staleness": Stat("mean", table.sum(), count),
            "sampling/staleness/max": Stat("max", functional.pad(table, (0, 1)).max(), count),
        }
        if most is not None:
            stats["sampling/too_old"] = Stat("mean", (table > most).sum().double(), count)
            for sample in samples:
                sample.oldest_version = step - most
        log_metrics(Metrics(stats))


class BatchesAhead(Ahead):
    """Completes whole generation batches, in rounds with the same weights.

    A round has ``generation_batches_ahead`` batches. When the completions of a round's last batch
    are complete, the weights are sent and the next round starts, before the policy trains on that
    batch. So all completions of a round come from the same weights. When training on them starts,
    those weights are one generation batch old for the round's first batch, and
    ``generation_batches_ahead`` old for its last batch, but never older.

    With dynamic sampling, the engine completes extra prompts first, and the next round starts when
    the batch is scored.
    """

    _has_batch = False  # True: further calls of next are for the same batch

    def next(self, count: int) -> list[Sample]:
        """Return completed samples; extra samples of the same generation batch are incomplete."""
        if self._has_batch:
            return self._prompts.next(count)
        self._has_batch = True
        if not self._draws:
            self._begin_round(1)
        elif any_process(not all(part.begun for part in self._draws[0].parts), self._accelerator):
            self._begin_round(0)  # draws whose completions a checkpoint does not hold
        with phase("generate"):
            samples = self._taken(self._draws[0].parts)
        if not self._args.dynamic_sampling:
            self._begin_next_round()
        return samples

    def scored(self, batch: Scored) -> None:
        self._has_batch = False
        if self._args.dynamic_sampling:
            self._begin_next_round()
        super().scored(batch)

    def _begin_next_round(self) -> None:
        """Start a round, if none is waiting, with no more batches than training needs."""
        count = min(self._args.generation_batches_ahead, self._batches_left())
        if not self._draws and count:
            self._begin_round(count)

    def _begin_round(self, count: int) -> None:
        self._sampler.send()
        for _ in range(count):
            self._draw(self._args.prompts_per_generation)
        self._begin()


class GroupsAhead(Ahead):
    """Completes groups at their own pace, while newer weights reach the engine.

    ``generation_batches_ahead`` batches of groups are started in addition to the one needed now. A
    batch gets the first groups that are complete, in the order in which they were started. The
    others continue with newer weights, and join a later batch: none is lost.
    """

    def next(self, count: int) -> list[Sample]:
        """Return the samples of ``count`` groups that are complete."""
        args, processes = self._args, self._accelerator.num_processes
        self._sampler.send()
        begun = sum(len(draw.parts) for draw in self._draws) * processes
        batches = min(args.generation_batches_ahead, self._batches_left())
        missing = batches * args.prompts_per_generation + count - begun
        if missing > 0:
            self._draw(missing, args.num_generations)
        self._begin()
        with phase("generate"):
            return self._taken(self._complete(count // processes))

    def _complete(self, count: int) -> list[Part]:
        """Wait for ``count`` parts, or for an error, and return the first complete ones."""
        parts = [part for draw in self._draws for part in draw.parts]
        while True:
            done = [part for part in parts if part.done]
            failed = [part for part in done if part.failed]
            if failed or len(done) >= count:
                return (failed + done)[:count]
            running = [part.work for part in parts if not part.done and part.work is not None]
            wait(running, return_when=FIRST_COMPLETED)


def _state(part: Part) -> dict[str, Any]:
    """Return the state of a complete part for a checkpoint."""
    metrics = part.metrics
    state: dict[str, Any] = {"place": part.place, "size": len(part.samples)}
    if metrics is None or not all(map(_can_be_held, part.samples)):
        return state | {"completed": None, "metrics": None}
    completed = [sample.completed_state() for sample in part.samples]
    stats = {name: (stat.kind, stat.total, stat.count) for name, stat in metrics.stats.items()}
    return state | {"completed": completed, "metrics": stats}


def _can_be_held(sample: Sample) -> bool:
    """Return whether a checkpoint can hold a completion: it has no environment, no images from
    tools, and only plain columns."""
    if "environments" in sample.inputs or (sample.images and sample.env_mask is not None):
        return False
    try:
        check_plain("columns", sample.columns)
    except ValueError:
        return False
    return True
