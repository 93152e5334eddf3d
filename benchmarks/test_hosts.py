"""Steps of other trainers: ``python -m pytest benchmarks/test_hosts.py --benchmark-only``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from benchmarks.child import ask
from benchmarks.conftest import Session
from benchmarks.hosts import ARMS, NO_HEAD, WORKS
from benchmarks.providers.baselines import lacking
from benchmarks.results import Row
from benchmarks.training.task import SIZES

_ROUNDS = 3
_LONGEST = 1800.0  # seconds
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
    """Time every arm in one process, in turns; then its memory, if the step is a full one."""
    work, words = WORKS[case.work], [case.size, case.work]
    absent = lacking(work.host, *_REQUIRES)
    rounds = "1" if session.suite == "tiny" else str(_ROUNDS)
    found = {} if absent else ask("benchmarks.hosts", [rounds, *words], _LONGEST)
    rows = {arm: Row(arm) for arm in names}
    rows |= {row["provider"]: Row(**row) for row in found.get("rows", ())}
    for arm, row in rows.items():
        row.leave_out("absent", absent)
        row.leave_out("wrong", found.get("failure"))
        if row.runs:
            row.info["version"] = version(work.host)
        if row.runs and not session.brief and arm != NO_HEAD:
            said = ask("benchmarks.hosts", ["1", *words, arm], _LONGEST)
            row.info |= {name: said[name] for name in ("grown_bytes",) if name in said}
    return [rows[arm] for arm in names]


def test_hosts(row: Row) -> None:
    """Time a step of a host's trainer."""
    assert row.seconds
