"""Groups of given completions with a common beginning: the cost of sharing it or not."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks import batches, training
from benchmarks.conftest import Session, check_row
from benchmarks.results import Row
from benchmarks.training import TrainingConfig
from grpo_trainer.policy import Packing, Prefixes

NOTES = {
    "padded": "packing: padded",
    "packed": "without padding, nothing shared",
    "prompt": "a group's prompt once",
    "tree": "packing: auto",
}


@dataclass(frozen=True)
class Case:
    """Groups with long prompts. Half of a group's completions begin with one turn, half with
    another; the lengths of the rest are log-normal."""

    config: TrainingConfig  # rows with the longest possible completion
    turn: int  # tokens
    mean: int  # of the rest

    def rows(self) -> batches.Rows:
        """Return the prompt and the completion of each row, random tokens."""
        config, chance = self.config, random.Random(training.SEED)
        middle = math.log(self.mean) - batches.SPREAD**2 / 2
        longest = config.completion_tokens - self.turn
        tokens = partial(batches.make_tokens, config, chance=chance)
        rows = []
        for _ in range(config.prompts):
            prompt = tokens(config.prompt_tokens)
            turns = tokens(self.turn), tokens(self.turn)
            for number in range(config.group):
                length = round(chance.lognormvariate(middle, batches.SPREAD))
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


_FULL = Case(TrainingConfig("full", 2, 384, 1536, 6, 2, 8192, 2, 8, 640, 640), 128, 128)
CASES = {
    "tiny": [Case(TrainingConfig("tiny", 1, 32, 64, 2, 1, 512, 2, 4, 24, 24), 8, 6)],
    "quick": [Case(TrainingConfig("quick", 2, 128, 512, 4, 2, 8192, 2, 8, 128, 128), 32, 32)],
    "cpu": [_FULL],
    "gpu": [_FULL],
    "gpu-full": [_FULL],
}


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    make = partial(_make, case, session.device)
    batches.measure_batches(rows, make, case.config.dtype, session)
    for row in rows:
        if row.runs:
            row.cells["tokens computed"] = f"{row.info['computed_tokens']:,}"


def _make(case: Case, device: str, name: str) -> batches.Batches:
    packing = "padded" if name == "padded" else "auto"
    trainer = batches.build("grpo_trainer", case.config, device, case.rows(), packing=packing)
    with _sharing(trainer, name, case):
        return batches.cut(trainer)


@contextmanager
def _sharing(trainer: Any, name: str, case: Case) -> Iterator[None]:
    """Let the trainer share as much as a provider."""
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


test_prefixes = check_row
