"""A generation batch of given completions of many lengths: what is computed of its padding."""

from __future__ import annotations

import importlib
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks import training
from benchmarks.check import StepResult as Step
from benchmarks.check import compare_steps, take_gradient, why_wrong
from benchmarks.child import ask
from benchmarks.conftest import Session
from benchmarks.measure import add_growth, attempt, free, race
from benchmarks.providers.base import Provider, is_ours
from benchmarks.results import Row
from benchmarks.timing import cuda_growth, make_timer, resident_growth
from benchmarks.training import TrainingConfig

_ROUNDS = 3
_SPREAD = 0.8  # standard deviation of a length's logarithm
_REQUIRES = ("transformers", "accelerate", "datasets")


@dataclass(frozen=True)
class Case:
    """Rows whose lengths, of prompt and completion, are log-normal."""

    config: TrainingConfig  # whose completions are the longest possible
    mean: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row of the generation batch."""
        config, draw = self.config, random.Random(training.SEED)
        shortest, longest = (
            config.prompt_tokens + 1,
            config.prompt_tokens + config.completion_tokens,
        )
        middle = math.log(self.mean) - _SPREAD**2 / 2
        drawn = (round(draw.lognormvariate(middle, _SPREAD)) for _ in range(config.sequences))
        return [min(max(length, shortest), longest) for length in drawn]

    def facts(self) -> dict[str, Any]:
        lengths = self.lengths
        found = {"sequences": len(lengths), "micro_batch": self.config.micro_batch}
        found["tokens"] = sum(lengths)
        found |= {"mean_length": round(mean(lengths)), "longest": max(lengths)}
        return {"model": self.config.model, "dtype": self.config.dtype, **found}

    def __str__(self) -> str:
        return self.config.name


_SIZES = {
    "tiny": Case(TrainingConfig("tiny", 1, 32, 64, 2, 1, 512, 2, 4, 4, 28), 12),
    "quick": Case(TrainingConfig("quick", 2, 128, 512, 4, 2, 8192, 2, 4, 16, 240), 64),
    "full": Case(TrainingConfig("full", 4, 256, 1024, 4, 2, 32000, 2, 8, 32, 992), 200),
}
CASES = {
    "tiny": [_SIZES["tiny"]],
    "quick": [_SIZES["quick"]],
    "cpu": [_SIZES["full"]],
    "gpu": [_SIZES["full"]],
    "gpu-full": [_SIZES["full"]],
}


def _build(package: str, case: Case, device: str, budget: bool = False, **changes: Any) -> Any:
    """Build a trainer whose completions are given: random tokens of the case's lengths.

    A ``budget`` is of as many tokens as two of the longest rows have.
    """
    config = case.config
    if budget:
        longest = config.prompt_tokens + config.completion_tokens
        changes["max_tokens_per_micro_batch"] = 2 * longest
    lengths = iter(case.lengths)
    draw = random.Random(training.SEED)

    def completed(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        wanted = [next(lengths) - config.prompt_tokens for _ in prompts]
        drawn = ([draw.randrange(2, config.vocabulary) for _ in range(n)] for n in wanted)
        return {"prompt_ids": prompt_ids, "completion_ids": [*drawn], "logprobs": None}

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    own = partial(importlib.import_module(package).GRPOTrainer, rollout_func=completed)
    return training.build(package, config, device, 1, own, generation_kwargs=None, **changes)


def _trainer(name: str, note: str, package: str, **changes: Any) -> Provider:
    """Return one whose ``run`` builds the trainer, for a case and a device."""
    return Provider(
        name=name,
        note=note,
        run=partial(_build, package, **changes),
        packages=(*_REQUIRES, *["trl"] * (package == "trl")),
    )


PROVIDERS = (
    _trainer("trl", "trl.GRPOTrainer", "trl"),
    _trainer("ours-padded", "packing='padded'", "grpo_trainer", packing="padded"),
    _trainer("ours-packed", "packing='packed'", "grpo_trainer", packing="packed"),
    _trainer(
        "ours-budget",
        "padded, micro-batches of so many tokens",
        "grpo_trainer",
        packing="padded",
        budget=True,
    ),
    _trainer("ours", "both", "grpo_trainer", budget=True),
)
_BY_NAME = {provider.name: provider for provider in PROVIDERS}


def _micro_batches(trainer: Any, ours: bool) -> list[Any]:
    """Return the generation batch as the trainer cuts it."""
    trainer.model.train()
    if ours:
        return trainer._generation_batch()
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    return trainer._buffered_inputs


def names(case: Case) -> list[str]:
    return [*_BY_NAME]


def measure(case: Case, names: Sequence[str], session: Session) -> list[Row]:
    device, rows = session.device, [Row(name, _BY_NAME[name].note) for name in names]
    steps: list[tuple[Row, Callable[[], Step]]] = []
    exact: Step | None = None
    for row in rows:
        row.leave_out("absent", _BY_NAME[row.provider].absent(device))
        if row.runs:
            with attempt(row):
                step = _step_of(row, case, device)
                found = step()
                exact = exact or found
                row.errors = compare_steps(found, exact)
                row.leave_out("wrong", why_wrong(row.errors, case.config.dtype))
                steps.append((row, step))
    race(steps, session.rounds(_ROUNDS), make_timer(device))
    free(device)
    if not session.brief:
        add_growth(rows, partial(ask, _growth, case, device))
    return rows


def _step_of(row: Row, case: Case, device: str) -> Callable[[], Step]:
    """Return what takes a step; add to the row how many tokens the body computes in one."""
    trainer = _BY_NAME[row.provider].run(case, device)
    batches = _micro_batches(trainer, is_ours(row.provider))
    computed = 0

    def note(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal computed
        computed += args[0].numel()

    hook = trainer.model.get_input_embeddings().register_forward_hook(note)
    _take(trainer, batches)
    hook.remove()
    row.info |= {"computed_tokens": computed, "padding": 1 - sum(case.lengths) / computed}
    row.cells["share of padding"] = f"{row.info['padding']:.0%}"
    return partial(_take, trainer, batches)


def _take(trainer: Any, batches: Sequence[Any]) -> Step:
    """Return the loss and the gradient of a generation batch."""
    total = torch.zeros(())
    for batch in batches:
        loss, leaves = training.step_of(trainer, batch)
        value = loss()
        value.backward()
        total = total + value.detach().cpu()
    return total, take_gradient(leaves)


def _growth(case: Case, device: str, name: str) -> int:
    """Return by how many bytes a process that does nothing else grows in a step."""
    provider, growth = _BY_NAME[name], cuda_growth if device == "cuda" else resident_growth
    for each in (_SIZES["tiny"], case):  # after the first libraries are loaded, threads started
        trainer = provider.run(each, device)
        batches = _micro_batches(trainer, is_ours(name))
        grown = growth(partial(_take, trainer, batches))[1]
    return grown


def test_padding(row: Row) -> None:
    """Time forward and backward of a generation batch."""
    assert row.seconds
