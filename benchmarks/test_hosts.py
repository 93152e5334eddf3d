"""Steps of other trainers: ``python -m pytest benchmarks/test_hosts.py --benchmark-only``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.conftest import Session
from benchmarks.hosts import ARMS, NO_HEAD, WORKS, growth, times
from benchmarks.measure import measure_apart
from benchmarks.providers.baselines import lacking
from benchmarks.results import Row
from benchmarks.training.task import SIZES

_ROUNDS = 3
_REQUIRES = ("peft", "transformers", "accelerate", "datasets")


@dataclass(frozen=True)
class Case:
    """A step of a host's trainer, with a model of a size."""

    work: str  # of WORKS
    size: str  # of SIZES

    def facts(self) -> dict[str, Any]:
        work, config = WORKS[self.work], SIZES[self.size]
        tokens = config.micro_batch * (config.prompt_tokens + config.completion_tokens)
        return {
            "host": work.host,
            "step": work.name,
            "model": str(config),
            "tokens": tokens,
            "dtype": "fp32",
        }

    def __str__(self) -> str:
        return f"{WORKS[self.work].host}: {self.work}, {self.size}"


_TINY = ("GRPOTrainer, LoRA", "DPOTrainer, all weights", "LigerFusedLinearGRPOLoss")
CASES = {
    "tiny": [Case(name, "quick") for name in _TINY],
    "quick": [Case(name, "quick") for name in WORKS],
    "cpu": [Case(name, "full") for name in WORKS],
    "gpu": [],
    "gpu-full": [],
}


def names(case: Case) -> list[str]:
    return [arm for arm in ARMS if arm in WORKS[case.work].arms]


def measure(case: Case, names: Sequence[str], session: Session) -> list[Row]:
    rows = [Row(name) for name in names]
    for row in rows:
        row.leave_out("absent", lacking(WORKS[case.work].host, *_REQUIRES))
    rounds = 1 if session.suite == "tiny" else _ROUNDS
    memory = [] if session.brief else [name for name in names if name != NO_HEAD]
    return measure_apart(rows, times, growth, (case.work, SIZES[case.size]), rounds, memory)


def test_hosts(row: Row) -> None:
    """Time a step of a host's trainer."""
    assert row.seconds
