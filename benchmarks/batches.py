"""Steps of trainers on a generation batch with given completions."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import training
from benchmarks.check import StepResult, compare_steps, take_gradient, why_wrong
from benchmarks.conftest import Session
from benchmarks.measure import attempt, race
from benchmarks.results import Row
from benchmarks.timing import make_timer
from benchmarks.training import TrainingConfig

SPREAD = 0.8  # standard deviation of a length's logarithm
_ROUNDS = 3
Rows = list[tuple[list[int], list[int]]]  # the prompt and the completion of each row
Batches = tuple[Any, list[Any]]  # a trainer, and its generation batch in micro-batches


def make_tokens(config: TrainingConfig, count: int, chance: random.Random) -> list[int]:
    return [chance.randrange(training.FIRST_WORD, config.vocabulary) for _ in range(count)]


def build(package: str, config: TrainingConfig, device: str, rows: Rows, **changes: Any) -> Any:
    """Build a trainer with given completions."""
    prompt_ids, completion_ids = zip(*rows, strict=True)

    def completed(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = {"prompt_ids": [*prompt_ids], "completion_ids": [*completion_ids]}
        return ids | {"logprobs": None}

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    own = partial(importlib.import_module(package).GRPOTrainer, rollout_func=completed)
    return training.build(package, config, device, 1, own, generation_kwargs=None, **changes)


def cut(trainer: Any) -> Batches:
    """Let a trainer, ours or TRL's, cut its generation batch into micro-batches."""
    trainer.model.train()
    if hasattr(trainer, "_generation_batch"):
        return trainer, trainer._generation_batch()
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    return trainer, trainer._buffered_inputs


def take(trainer: Any, batches: Sequence[Any]) -> StepResult:
    """Return the loss and the gradient of a generation batch."""
    total = torch.zeros(())
    for batch in batches:
        loss, leaves = training.step_of(trainer, batch)
        value = loss()
        value.backward()
        total = total + value.detach().cpu()
    return total, take_gradient(leaves)


def measure_batches(
    rows: Sequence[Row], make: Callable[[str], Batches], dtype: str, session: Session
) -> None:
    """Compare the step of each row's trainer with the first one's, and time them in turns.

    ``computed_tokens`` of a row is the number of tokens that its trainer's body computes in a step.
    """
    steps: list[tuple[Row, Callable[[], StepResult]]] = []
    exact: StepResult | None = None
    for row in rows:
        if row.runs:
            with attempt(row):
                trainer, batches = make(row.provider)
                found, row.info["computed_tokens"] = _counted(trainer, batches)
                exact = exact or found
                row.errors = compare_steps(found, exact)
                row.leave_out("wrong", why_wrong(row.errors, dtype))
                steps.append((row, partial(take, trainer, batches)))
    race(steps, session.rounds(_ROUNDS), make_timer(session.device))


def _counted(trainer: Any, batches: Sequence[Any]) -> tuple[StepResult, int]:
    computed = 0

    def note(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal computed
        computed += args[0].numel()

    hook = trainer.model.get_input_embeddings().register_forward_hook(note)
    found = take(trainer, batches)
    hook.remove()
    return found, computed
