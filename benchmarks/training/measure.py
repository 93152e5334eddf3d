"""Steps of several trainers, taken in turns."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.measure import describe
from benchmarks.results import TrainingRow, TrainingTable
from benchmarks.training import batch
from benchmarks.training.batch import Reference, make_reference
from benchmarks.training.isolation import own_globals
from benchmarks.training.providers import (
    PROVIDERS,
    Job,
    TrainerProvider,
    missing_module,
    not_installed,
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
    """Measure steps of every trainer.

    Every trainer is built, compared with the reference at its initial weights, and warmed up by a
    step. Then a round is one step of each, backwards every other time.

    Args:
        config: the shapes.
        device: ``cpu`` or ``cuda``.
        rounds: measured steps of each trainer.
        providers: the trainers.
        deadline: by ``time.monotonic()``; no round but the first begins after it.
    """
    contestants = [_Contestant(provider, device) for provider in providers]
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
                each.close()
            gc.collect()


@dataclass
class _Contestant:
    """One trainer and its row."""

    provider: TrainerProvider
    device: str
    training: PausedTraining | None = None
    steps: list[Step] = field(default_factory=list)
    patched: dict[str, Any] = field(default_factory=dict)  # names of the model's module

    def __post_init__(self) -> None:
        absent = self.provider.absent(self.device)
        self.row = TrainingRow(self.provider.name, self.provider.note, absent=absent)

    def attempt(self, call: Callable[[_Contestant], None]) -> None:
        """Call; an error of a trainer is its result, not the end of the others."""
        if not self.row.runs:
            return
        try:
            with own_globals(self.patched):
                call(self)
        except Exception as error:
            if (name := missing_module(error)) is not None:
                self.row.absent = not_installed(name)
            else:
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

    def close(self) -> None:
        if self.training is not None:
            self.training.close()
            self.training = None


def _run(contestants: list[_Contestant], job: Job, rounds: int, deadline: float) -> None:
    exact = make_reference(job.config, job.device)
    for each in contestants:
        each.attempt(partial(_start, job=job, exact=exact))
    del exact
    for each in contestants:
        each.attempt(partial(_step, seed=0))
        each.steps.clear()  # that was the warm-up
    for index in range(rounds):
        if index > 0 and time.monotonic() > deadline:
            break
        for each in contestants if index % 2 == 0 else reversed(contestants):
            each.attempt(partial(_step, seed=1 + index))
    for each in contestants:
        each.attempt(partial(_check_lengths, expected=job.config.completion_tokens))


def _start(each: _Contestant, job: Job, exact: Reference) -> None:
    from benchmarks.training.paused import PausedTraining

    each.training = PausedTraining(each.provider.build(job), job.device)
    trainer = each.training.trainer
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model_wrapped, each.provider.inputs(exact.batch))
    loss.backward()
    each.row.errors = batch.compare(trainer.model, loss, exact)
    trainer.model.zero_grad()
    each.row.failure = batch.failure(each.row.errors, job.dtype)


def _step(each: _Contestant, seed: int) -> None:
    assert each.training is not None
    torch.manual_seed(seed)  # all trainers sample alike
    each.steps.append(each.training.step())


def _check_lengths(each: _Contestant, expected: int) -> None:
    """Check that the work was that of all the others."""
    lengths = each.logged("completions/mean_length")
    if lengths != [float(expected)] * len(each.steps):
        each.row.failure = f"completions of {lengths} tokens; expected {expected}"
