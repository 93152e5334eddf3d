"""Groups of given completions that begin alike: what is computed of what they share."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import training
from benchmarks.check import StepResult, compare_steps, take_gradient, why_wrong
from benchmarks.conftest import Session
from benchmarks.measure import attempt, free, race
from benchmarks.results import Row
from benchmarks.timing import make_timer
from benchmarks.training import TrainingConfig
from grpo_trainer import GRPOTrainer
from grpo_trainer.policy import Packing, Prefixes

_ROUNDS = 3
_SPREAD = 0.8  # standard deviation of a length's logarithm
_NOTES = {
    "padded": "packing: padded",
    "packed": "without padding, nothing shared",
    "prompt": "a group's prompt once",
    "tree": "packing: auto",
}


@dataclass(frozen=True)
class Case:
    """Groups with long prompts. Half of a group's completions begin with one turn, half with
    another; the lengths of what follows are log-normal."""

    config: TrainingConfig  # whose completions are the longest possible
    turn: int  # tokens
    mean: int  # of what follows

    def rows(self) -> list[tuple[list[int], list[int]]]:
        """Return the prompt and the completion of each row, random tokens."""
        config, chance = self.config, random.Random(training.SEED)
        middle = math.log(self.mean) - _SPREAD**2 / 2
        longest = config.completion_tokens - self.turn

        def tokens(count: int) -> list[int]:
            return [chance.randrange(training.FIRST_WORD, config.vocabulary) for _ in range(count)]

        rows = []
        for _ in range(config.prompts):
            prompt = tokens(config.prompt_tokens)
            turns = tokens(self.turn), tokens(self.turn)
            for number in range(config.group):
                length = round(chance.lognormvariate(middle, _SPREAD))
                rest = tokens(min(max(length, 1), longest))
                rows.append((prompt, turns[number % 2] + rest))
        return rows

    def facts(self) -> dict[str, Any]:
        config, lengths = self.config, [len(completion) for _, completion in self.rows()]
        return {
            "model": config.model,
            "dtype": config.dtype,
            "sequences": len(lengths),
            "group": config.group,
            "prompt_tokens": config.prompt_tokens,
            "turn_tokens": self.turn,
            "mean_completion": round(sum(lengths) / len(lengths)),
            "longest_completion": max(lengths),
            "tokens": sum(lengths) + len(lengths) * config.prompt_tokens,
        }

    def __str__(self) -> str:
        return self.config.name


_SIZES = {
    "tiny": Case(TrainingConfig("tiny", 1, 32, 64, 2, 1, 512, 2, 4, 24, 24), 8, 6),
    "quick": Case(TrainingConfig("quick", 2, 128, 512, 4, 2, 8192, 2, 8, 128, 128), 32, 32),
    "full": Case(TrainingConfig("full", 2, 384, 1536, 6, 2, 8192, 2, 8, 640, 640), 128, 128),
}
CASES = {
    "tiny": [_SIZES["tiny"]],
    "quick": [_SIZES["quick"]],
    "cpu": [_SIZES["full"]],
    "gpu": [_SIZES["full"]],
    "gpu-full": [_SIZES["full"]],
}


def names(case: Case) -> list[str]:
    return [*_NOTES]


def measure(case: Case, names: Sequence[str], session: Session) -> list[Row]:
    device, rows = session.device, [Row(name, _NOTES[name]) for name in names]
    steps: list[tuple[Row, Callable[[], StepResult]]] = []
    exact: StepResult | None = None
    for row in rows:
        with attempt(row):
            step, found = _step_of(row, case, device)
            exact = exact or found
            row.errors = compare_steps(found, exact)
            row.leave_out("wrong", why_wrong(row.errors, case.config.dtype))
            steps.append((row, step))
    race(steps, session.rounds(_ROUNDS), make_timer(device))
    free(device)
    return rows


def _step_of(row: Row, case: Case, device: str) -> tuple[Callable[[], StepResult], StepResult]:
    """Return what takes a step, and one; add to the row how many tokens its body computed."""
    trainer = _build(case, device, "padded" if row.provider == "padded" else "auto")
    trainer.model.train()
    with _sharing(trainer, row.provider, case):
        batches = trainer._generation_batch()
    computed = 0

    def note(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal computed
        computed += args[0].numel()

    hook = trainer.model.get_input_embeddings().register_forward_hook(note)
    found = _take(trainer, batches)
    hook.remove()
    row.info["computed_tokens"] = computed
    row.cells["tokens computed"] = f"{computed:,}"
    return partial(_take, trainer, batches), found


def _build(case: Case, device: str, packing: str) -> Any:
    """Build a trainer of given rows."""
    prompt_ids, completion_ids = zip(*case.rows(), strict=True)

    def completed(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = {"prompt_ids": [*prompt_ids], "completion_ids": [*completion_ids]}
        return ids | {"logprobs": None}

    own = partial(GRPOTrainer, rollout_func=completed)
    changes = {"packing": packing, "generation_kwargs": None}
    return training.build("grpo_trainer", case.config, device, 1, own, **changes)


@contextmanager
def _sharing(trainer: Any, name: str, case: Case) -> Iterator[None]:
    """Let the trainer share as much as a provider does."""
    trainer._columns = [
        replace(column, shares=name != "packed") if isinstance(column, Packing) else column
        for column in trainer._columns
    ]
    exact = Prefixes.of

    def of_prompts(rows: Sequence[list[int]]) -> Prefixes:
        prefixes = exact(rows)
        common = [min(shared, case.config.prompt_tokens) for shared in prefixes.common]
        return replace(prefixes, common=common)

    with patch.object(Prefixes, "of", of_prompts) if name == "prompt" else nullcontext():
        yield


def _take(trainer: Any, batches: Sequence[Any]) -> StepResult:
    """Return the loss and the gradient of a generation batch."""
    total = torch.zeros(())
    for batch in batches:
        loss, leaves = training.step_of(trainer, batch)
        value = loss()
        value.backward()
        total = total + value.detach().cpu()
    return total, take_gradient(leaves)


def test_prefixes(row: Row) -> None:
    """Time forward and backward of a generation batch."""
    assert row.seconds
