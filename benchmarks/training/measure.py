"""Steps of several trainers, taken in turns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from benchmarks.check import why_wrong
from benchmarks.measure import describe, in_turns
from benchmarks.results import TrainingRow, TrainingTable
from benchmarks.training.batch import Reference, compare, make_reference
from benchmarks.training.providers import (
    PROVIDERS,
    Job,
    TrainerProvider,
)
from benchmarks.training.task import TrainingConfig

if TYPE_CHECKING:
    from benchmarks.training.paused import PausedTraining, Step

_WARM_UP = 1  # steps


def measure_training(
    config: TrainingConfig,
    device: str,
    rounds: int,
    providers: Sequence[TrainerProvider] = PROVIDERS,
    deadline: float = float("inf"),
) -> TrainingTable:
    """Measure ``rounds`` steps of every trainer, in turns.

    Each is first compared with the reference at its initial weights, and warmed up by a step. No
    round but the first begins after ``deadline``, by ``time.monotonic()``.
    """
    contestants = [Contestant(provider, device) for provider in providers]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            config=config,
            device=device,
            steps=_WARM_UP + rounds + 1,  # the last one is never taken
            folder=Path(folder),
        )
        try:
            if any(each.row.runs for each in contestants):
                _run(contestants, job, rounds, deadline)
            return TrainingTable(
                model=str(config),
                tokens=config.tokens,
                dtype=job.dtype,
                sequences=config.sequences,
                prompt_tokens=config.prompt_tokens,
                completion_tokens=config.completion_tokens,
                micro_batches=config.micro_batches,
                optimizer="adamw",
                reference="float32, full logits",
                rows=[each.finished() for each in contestants],
            )
        finally:
            for each in contestants:
                if each.training is not None:
                    each.training.close()


@dataclass
class Contestant:
    """One trainer and its row."""

    provider: TrainerProvider
    device: str
    training: PausedTraining | None = None
    steps: list[Step] = field(default_factory=list)
    # the names of the model's module, which Liger replaces: the others keep their own
    patched: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        absent = self.provider.absent(self.device)
        self.row = TrainingRow(self.provider.name, self.provider.note, absent=absent)

    def attempt(self, call: Callable[[Contestant], None]) -> None:
        """Call; an error of a trainer is its result, not the end of the others."""
        from transformers.models.qwen2 import modeling_qwen2

        if not self.row.runs:
            return
        try:
            with patch.dict(vars(modeling_qwen2), self.patched):
                call(self)
                self.patched = dict(vars(modeling_qwen2))
        except Exception as error:
            self.row.failure = describe(error)

    def logged(self, name: str) -> list[float]:
        """Return what ``train()`` logged at the measured steps."""
        assert self.training is not None
        history = self.training.trainer.state.log_history
        return [entry[name] for entry in history if name in entry][_WARM_UP:]

    def finished(self) -> TrainingRow:
        row, steps = self.row, self.steps if self.row.runs else []
        row.seconds = [step.seconds for step in steps]
        row.phases = {name: [getattr(x, name) for x in steps] for name in ("generate", "train")}
        peaks = [step.memory for step in steps if step.memory is not None]
        row.memory = {"train": max(peaks)} if peaks else None
        if steps:
            row.loss, row.grad_norm = self.logged("loss"), self.logged("grad_norm")
        return row


def _run(contestants: list[Contestant], job: Job, rounds: int, deadline: float) -> None:
    exact = make_reference(job.config, job.device)
    for each in contestants:
        each.attempt(partial(_start, job=job, exact=exact))
    del exact
    for each in contestants:
        each.attempt(partial(_step, seed=0))
        each.steps.clear()  # that was the warm-up
    turns = in_turns([(each, each.steps) for each in contestants], rounds, deadline)
    for each, steps in turns:
        each.attempt(partial(_step, seed=1 + len(steps)))
    for each in contestants:
        each.attempt(partial(_check_lengths, expected=job.config.completion_tokens))


def _start(each: Contestant, job: Job, exact: Reference) -> None:
    from benchmarks.training.paused import PausedTraining

    each.training = PausedTraining(each.provider.build(job), job.device)
    trainer = each.training.trainer
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model_wrapped, each.provider.inputs(exact.batch))
    loss.backward()
    each.row.errors = compare(trainer.model, loss, exact)
    trainer.model.zero_grad()
    each.row.failure = why_wrong(each.row.errors, job.dtype)


def _step(each: Contestant, seed: int) -> None:
    assert each.training is not None
    torch.manual_seed(seed)  # all trainers sample alike
    each.steps.append(each.training.step())


def _check_lengths(each: Contestant, expected: int) -> None:
    """Check that the work was that of all the others."""
    lengths = each.logged("completions/mean_length")
    if lengths != [float(expected)] * len(each.steps):
        each.row.failure = f"completions of {lengths} tokens; expected {expected}"
