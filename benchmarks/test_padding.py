"""A generation batch with given completions of many lengths: the cost of its padding."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from benchmarks import batches, training
from benchmarks.child import ask
from benchmarks.conftest import Session, check_row
from benchmarks.measure import add_growth
from benchmarks.providers.base import is_ours, lacking
from benchmarks.results import Row
from benchmarks.timing import cuda_growth, resident_growth
from benchmarks.training import TrainingConfig

NOTES = {
    "trl": "trl.GRPOTrainer",
    "ours-padded": "packing='padded'",
    "ours-packed": "packing='packed'",
    "ours-budget": "padded, with a token budget for each micro-batch",
    "ours": "both",
}
_CHANGES: dict[str, dict[str, Any]] = {
    "ours-padded": {"packing": "padded"},
    "ours-packed": {"packing": "packed"},
    "ours-budget": {"packing": "padded"},
}
_BUDGETED = ("ours-budget", "ours")


@dataclass(frozen=True)
class Case:
    """Rows with log-normal lengths of prompt and completion."""

    config: TrainingConfig  # rows with the longest possible completion
    mean: int

    @property
    def longest(self) -> int:
        return self.config.prompt_tokens + self.config.completion_tokens

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row of the generation batch."""
        draw, shortest = random.Random(training.SEED), self.config.prompt_tokens + 1
        middle = math.log(self.mean) - batches.SPREAD**2 / 2
        lengths = (
            round(draw.lognormvariate(middle, batches.SPREAD)) for _ in range(self.config.sequences)
        )
        return [min(max(length, shortest), self.longest) for length in lengths]

    def rows(self) -> batches.Rows:
        config, chance = self.config, random.Random(training.SEED)
        prompts = [
            batches.make_tokens(config, config.prompt_tokens, chance) for _ in range(config.prompts)
        ]
        return [
            (
                prompts[number // config.group],
                batches.make_tokens(config, length - config.prompt_tokens, chance),
            )
            for number, length in enumerate(self.lengths)
        ]

    def facts(self) -> dict[str, Any]:
        lengths = self.lengths
        found = {"sequences": len(lengths), "micro_batch": self.config.micro_batch}
        found["tokens"] = sum(lengths)
        found |= {"mean_length": round(mean(lengths)), "longest": max(lengths)}
        return {"model": self.config.model, "dtype": self.config.dtype, **found}

    def __str__(self) -> str:
        return self.config.name


_TINY = Case(TrainingConfig("tiny", 1, 32, 64, 2, 1, 512, 2, 4, 4, 28), 12)
_FULL = Case(TrainingConfig("full", 4, 256, 1024, 4, 2, 32000, 2, 8, 32, 992), 200)
CASES = {
    "tiny": [_TINY],
    "quick": [Case(TrainingConfig("quick", 2, 128, 512, 4, 2, 8192, 2, 4, 16, 240), 64)],
    "cpu": [_FULL],
    "gpu": [_FULL],
    "gpu-full": [_FULL],
}


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    for row in rows:
        trl = ["trl"] * (not is_ours(row.provider))
        row.leave_out("absent", lacking("transformers", "accelerate", "datasets", *trl))
    make = partial(_make, case, session.device)
    batches.measure_batches(rows, make, case.config.dtype, session)
    for row in rows:
        if row.runs:
            row.info["padding"] = 1 - sum(case.lengths) / row.info["computed_tokens"]
            row.cells["share of padding"] = f"{row.info['padding']:.0%}"
    if not session.brief:
        add_growth(rows, partial(ask, _growth, case, session.device))


def _make(case: Case, device: str, name: str) -> batches.Batches:
    changes = _CHANGES.get(name, {})
    if name in _BUDGETED:
        changes = changes | {"max_tokens_per_micro_batch": 2 * case.longest}
    package = "grpo_trainer" if is_ours(name) else "trl"
    return batches.cut(batches.build(package, case.config, device, case.rows(), **changes))


def _growth(case: Case, device: str, name: str) -> int:
    """Return by how many bytes an otherwise idle process grows in a step."""
    growth = cuda_growth if device == "cuda" else resident_growth
    for each in (_TINY, case):  # after the first step, libraries are loaded and threads started
        grown = growth(partial(batches.take, *_make(each, device, name)))[1]
    return grown


test_padding = check_row
