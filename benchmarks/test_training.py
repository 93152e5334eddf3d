"""A GRPO step of a small model with a real head: our trainer beside TRL's, generation included."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from benchmarks.check import why_wrong
from benchmarks.conftest import DEVICE, Session
from benchmarks.measure import attempt
from benchmarks.results import Row
from benchmarks.timing import in_turns
from benchmarks.training.batch import Reference, compare, make_reference
from benchmarks.training.task import Sized
from benchmarks.training.trainers import PROVIDERS, Job, TrainerProvider, precision

if TYPE_CHECKING:
    from benchmarks.training.paused import PausedTraining, Step

_WARM_UP, _ROUNDS = 1, 5  # steps
_DTYPE = precision(DEVICE)
CASES = {
    "tiny": [Sized("tiny", _DTYPE)],
    "quick": [Sized("quick", _DTYPE)],
    "cpu": [Sized("full")],
    "gpu": [Sized("full-gpu", _DTYPE)],
    "gpu-full": [Sized("full-gpu", _DTYPE)],
}


def names(case: Sized) -> list[str]:
    return [provider.name for provider in PROVIDERS]


def measure(case: Sized, names: Sequence[str], session: Session) -> list[Row]:
    providers = [provider for provider in PROVIDERS if provider.name in names]
    rounds = 1 if session.suite == "tiny" else _ROUNDS
    return measure_training(case, providers, session.device, rounds, session.deadline)


def about(case: Sized, device: str) -> str:
    return "errors against full logits in float32; AdamW"


def measure_training(
    case: Sized,
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
        job = Job(config=case.config, device=device, steps=steps, folder=Path(folder))
        try:
            if any(each.row.runs for each in contestants):
                _run(contestants, job, rounds, deadline)
            return [each.finished() for each in contestants]
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
        self.row = Row(self.provider.name, self.provider.note)
        self.row.leave_out("absent", self.provider.absent(self.device))

    def attempt(self, call: Callable[[Contestant], None]) -> None:
        """Call; an error of a trainer is its result, not the end of the others."""
        from transformers.models.qwen2 import modeling_qwen2

        if not self.row.runs:
            return
        with attempt(self.row), patch.dict(vars(modeling_qwen2), self.patched):
            call(self)
            self.patched = dict(vars(modeling_qwen2))

    def logged(self, name: str) -> list[float]:
        """Return what ``train()`` logged at the measured steps."""
        assert self.training is not None
        history = self.training.trainer.state.log_history
        return [entry[name] for entry in history if name in entry][_WARM_UP:]

    def finished(self) -> Row:
        row, steps = self.row, self.steps
        if row.runs and steps:
            row.seconds = [step.seconds for step in steps]
            row.info["generate_seconds"] = median(step.generate for step in steps)
            row.info["train_seconds"] = median(step.train for step in steps)
            peaks = [step.memory for step in steps if step.memory is not None]
            row.info |= {"train_bytes": max(peaks)} if peaks else {}
            # the loss of an on-policy step is 0 but for rounding; its gradient is not
            norms = self.logged("grad_norm")
            row.info["grad_norm"] = [norms[0], norms[-1]]
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
    each.row.leave_out("wrong", why_wrong(each.row.errors, job.dtype))


def _step(each: Contestant, seed: int) -> None:
    assert each.training is not None
    torch.manual_seed(seed)  # all trainers sample alike
    each.steps.append(each.training.step())


def _check_lengths(each: Contestant, expected: int) -> None:
    """Check that the work was that of all the others."""
    lengths = each.logged("completions/mean_length")
    if lengths != [float(expected)] * len(each.steps):
        reason = f"completions of {lengths} tokens; expected {expected}"
        each.row.leave_out("wrong", reason)


def test_training(row: Row) -> None:
    """Time a whole training step, ours beside TRL's."""
    assert row.seconds
