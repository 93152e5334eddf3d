"""A GRPO step of a small model with a real head: our trainer beside TRL's, generation included."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from benchmarks.check import StepResult, compare_steps, take_gradient, why_wrong
from benchmarks.conftest import DEVICE, Session
from benchmarks.measure import attempt
from benchmarks.results import Row
from benchmarks.timing import in_turns
from benchmarks.training.task import SIZES, TrainingConfig
from benchmarks.training.trainers import (
    PROVIDERS,
    Batch,
    Job,
    TrainerProvider,
    make_reference,
    precision,
)

if TYPE_CHECKING:
    from benchmarks.training.paused import PausedTraining, StepCost

_WARM_UP, _ROUNDS = 1, 5  # steps
_GPU = [replace(SIZES["full-gpu"], dtype=precision(DEVICE))]
CASES = {
    "tiny": [replace(SIZES["tiny"], dtype=precision(DEVICE))],
    "quick": [replace(SIZES["quick"], dtype=precision(DEVICE))],
    "cpu": [SIZES["full"]],
    "gpu": _GPU,
    "gpu-full": _GPU,
}


def names(case: TrainingConfig) -> list[str]:
    return [provider.name for provider in PROVIDERS]


def measure(case: TrainingConfig, names: Sequence[str], session: Session) -> list[Row]:
    providers = [provider for provider in PROVIDERS if provider.name in names]
    rounds = 1 if session.suite == "tiny" else _ROUNDS
    return measure_training(case, providers, session.device, rounds, session.deadline)


def about(case: TrainingConfig, device: str) -> str:
    return "errors against full logits in float32; AdamW"


def measure_training(
    case: TrainingConfig,
    providers: Sequence[TrainerProvider],
    device: str,
    rounds: int,
    deadline: float = float("inf"),
) -> list[Row]:
    """Measure ``rounds`` steps of every trainer, in turns.

    Each is first compared with the reference at its initial weights, and warmed up by a step. No
    round but the first begins after ``deadline``, by ``time.monotonic()``.
    """
    contestants = [Contestant(provider, device) for provider in providers]
    with tempfile.TemporaryDirectory() as folder:
        steps = _WARM_UP + rounds + 1  # the last one is never taken
        job = Job(config=case, device=device, steps=steps, folder=Path(folder))
        try:
            if any(each.row.runs for each in contestants):
                _run(contestants, job, rounds, deadline)
            return [each.finished(job.config.completion_tokens) for each in contestants]
        finally:
            for each in contestants:
                if each.training is not None:
                    each.training.close()


class Contestant:
    """One trainer and its row."""

    def __init__(self, provider: TrainerProvider, device: str) -> None:
        self.provider = provider
        self.training: PausedTraining | None = None
        self.costs: list[StepCost] = []
        # the names of the model's module, which Liger replaces: the others keep their own
        self._patched: dict[str, Any] = {}
        self.row = Row(provider.name, provider.note)
        self.row.leave_out("absent", provider.absent(device))

    @contextmanager
    def attempted(self) -> Iterator[None]:
        """Make an error of the trainer its result, not the end of the others."""
        from transformers.models.qwen2 import modeling_qwen2

        with attempt(self.row), patch.dict(vars(modeling_qwen2), self._patched):
            yield
            self._patched = dict(vars(modeling_qwen2))

    def start(self, job: Job, batch: Batch, exact: StepResult) -> None:
        from benchmarks.training.paused import PausedTraining

        self.training = PausedTraining(self.provider.build(job), job.device)
        trainer = self.training.trainer
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model_wrapped, self.provider.inputs(batch))
        loss.backward()
        gradient = take_gradient(trainer.model.parameters())
        self.row.errors = compare_steps((loss.detach(), gradient), exact)
        self.row.leave_out("wrong", why_wrong(self.row.errors, job.dtype))

    def step(self) -> None:
        assert self.training is not None
        torch.manual_seed(len(self.costs))  # all trainers sample alike
        self.costs.append(self.training.step())

    def finished(self, completion_tokens: int) -> Row:
        """Return the row, with what was measured after the warm-up."""
        row, costs = self.row, self.costs[_WARM_UP:]
        if not row.runs or not costs:
            return row
        assert self.training is not None
        history = self.training.trainer.state.log_history
        history = [logged for logged in history if "grad_norm" in logged][_WARM_UP:]
        lengths = [logged["completions/mean_length"] for logged in history]
        if lengths != [float(completion_tokens)] * len(costs):  # its work was not the others'
            reason = f"completions of {lengths} tokens; expected {completion_tokens}"
            row.leave_out("wrong", reason)
            return row
        row.seconds = [cost.generate + cost.train for cost in costs]
        row.info["generate_seconds"] = median(cost.generate for cost in costs)
        row.info["train_seconds"] = median(cost.train for cost in costs)
        peaks = [cost.memory for cost in costs if cost.memory is not None]
        row.info |= {"train_bytes": max(peaks)} if peaks else {}
        # the loss of an on-policy step is 0 but for rounding; its gradient is not
        row.info["grad_norm"] = [history[0]["grad_norm"], history[-1]["grad_norm"]]
        return row


def _run(contestants: list[Contestant], job: Job, rounds: int, deadline: float) -> None:
    batch, exact = make_reference(job.config, job.device)
    for each in contestants:
        if each.row.runs:
            with each.attempted():
                each.start(job, batch, exact)
    del batch, exact
    turns = [(each, each.step) for each in contestants]
    for each, step in chain(turns, in_turns(turns, rounds, deadline)):
        if each.row.runs:
            with each.attempted():
                step()


def test_training(row: Row) -> None:
    """Time a whole training step, ours beside TRL's."""
    assert row.seconds
