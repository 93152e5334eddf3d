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
) -> dict[str, Any]:
    """An entry of the result file's ``training`` list, as plain data.

    Every trainer is built, compared with the reference at its initial weights, and warmed up by a
    step. Then a round is one step of each, backwards every other time.

    Args:
        config: the shapes.
        device: ``cpu`` or ``cuda``.
        rounds: measured steps of each trainer.
        providers: the trainers.
        deadline: by ``time.monotonic()``; no round but the first begins after it.
    """
    rows = [_Row(provider, provider.absent(device)) for provider in providers]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            config=config,
            device=device,
            steps=_WARM_UP + rounds + 1,  # the last one is never taken
            folder=Path(folder),
        )
        try:
            if any(row.runs for row in rows):
                _run(rows, job, rounds, deadline)
            return _entry(rows, job)
        finally:
            for row in rows:
                row.close()
            gc.collect()


@dataclass
class _Row:
    """One trainer's line; without times where it is absent or failed."""

    provider: TrainerProvider
    absent: str | None = None
    failure: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    training: PausedTraining | None = None
    steps: list[Step] = field(default_factory=list)
    patched: dict[str, Any] = field(default_factory=dict)  # names of the model's module

    @property
    def runs(self) -> bool:
        return self.absent is None and self.failure is None

    def attempt(self, call: Callable[[_Row], None]) -> None:
        """An error of a trainer is its result, not the end of the others."""
        if not self.runs:
            return
        try:
            with own_globals(self.patched):
                call(self)
        except Exception as error:
            if (name := missing_module(error)) is not None:
                self.absent = not_installed(name)
            else:
                self.failure = f"{type(error).__name__}: {error}"

    def logged(self, name: str) -> list[float]:
        """Values that ``train()`` logged at the measured steps."""
        assert self.training is not None
        history = self.training.trainer.state.log_history
        return [entry[name] for entry in history if name in entry][_WARM_UP:]

    def close(self) -> None:
        if self.training is not None:
            self.training.close()
            self.training = None


def _run(rows: list[_Row], job: Job, rounds: int, deadline: float) -> None:
    _start_all(rows, job)
    for row in rows:
        row.attempt(partial(_step, seed=0))
        row.steps.clear()  # that was the warm-up
    for index in range(rounds):
        if index > 0 and time.monotonic() > deadline:
            break
        for row in rows if index % 2 == 0 else reversed(rows):
            row.attempt(partial(_step, seed=1 + index))
    for row in rows:
        row.attempt(partial(_check_lengths, expected=job.config.completion_tokens))


def _start_all(rows: list[_Row], job: Job) -> None:
    exact = make_reference(job.config, job.device)
    for row in rows:
        row.attempt(partial(_start, job=job, exact=exact))


def _start(row: _Row, job: Job, exact: Reference) -> None:
    from benchmarks.training.paused import PausedTraining

    row.training = PausedTraining(row.provider.build(job), job.device)
    trainer = row.training.trainer
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model_wrapped, row.provider.inputs(exact.batch))
    loss.backward()
    row.errors = batch.compare(trainer.model, loss, exact)
    trainer.model.zero_grad()
    row.failure = batch.failure(row.errors, job.dtype)


def _step(row: _Row, seed: int) -> None:
    assert row.training is not None
    torch.manual_seed(seed)  # all trainers sample alike
    row.steps.append(row.training.step())


def _check_lengths(row: _Row, expected: int) -> None:
    """The work was that of all the others."""
    lengths = row.logged("completions/mean_length")
    if lengths != [float(expected)] * len(row.steps):
        row.failure = f"completions of {lengths} tokens; expected {expected}"


def _entry(rows: list[_Row], job: Job) -> dict[str, Any]:
    config = job.config
    return {
        "model": str(config),
        "tokens": config.tokens,
        "dtype": job.dtype,
        "sequences": config.sequences,
        "prompt_tokens": config.prompt_tokens,
        "completion_tokens": config.completion_tokens,
        "micro_batches": config.micro_batches,
        "optimizer": "adamw",
        "reference": "float32, full logits",
        "rows": [_line(row) for row in rows],
    }


def _line(row: _Row) -> dict[str, Any]:
    steps = row.steps if row.runs else []
    peaks = [step.memory for step in steps if step.memory is not None]
    return {
        "provider": row.provider.name,
        "note": row.provider.note,
        "absent": row.absent,
        "failure": row.failure,
        "errors": row.errors,
        "seconds": [step.seconds for step in steps],
        "phases": {
            "generate": [step.generate for step in steps],
            "train": [step.train for step in steps],
        },
        "memory": {"train": max(peaks)} if peaks else None,
        "loss": row.logged("loss") if steps else [],
        "grad_norm": row.logged("grad_norm") if steps else [],
    }
