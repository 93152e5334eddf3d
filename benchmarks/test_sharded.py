"""A head over several ranks: ``python -m pytest benchmarks/test_sharded.py --benchmark-only``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.conftest import Session
from benchmarks.measure import measure_apart
from benchmarks.results import Row
from benchmarks.shapes import MODELS, Case
from benchmarks.sharded import ARMS, growth, times
from benchmarks.work import WORKS

_ROUNDS = 3


@dataclass(frozen=True)
class Sharded(Case):
    """A case on several processes of this machine, a thread each."""

    ranks: int = 2

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "ranks": self.ranks}


def _sharded(model: str, tokens: int, dtype: str) -> Sharded:
    return Sharded(MODELS[model], tokens, dtype, WORKS["dapo"])


_BOTH = ("fp32", "bf16")
CASES = {
    "tiny": [_sharded("tiny", 32, dtype) for dtype in _BOTH],
    "quick": [_sharded("small", 128, dtype) for dtype in _BOTH],
    # of many tokens the logits would take more memory than the gathered head
    "cpu": [_sharded("qwen2.5-0.5b", *x) for x in ((1024, "fp32"), (1024, "bf16"), (4096, "bf16"))],
    "gpu": [],
    "gpu-full": [],
}


def names(case: Sharded) -> list[str]:
    return list(ARMS)


def measure(case: Sharded, names: Sequence[str], session: Session) -> list[Row]:
    rows = [Row(name, ARMS[name].note) for name in names]
    rounds = 1 if session.suite == "tiny" else _ROUNDS
    memory = [] if session.brief else names
    return measure_apart(rows, times, growth, (case, case.ranks), rounds, memory)


def test_sharded(row: Row) -> None:
    """Time a step over several ranks."""
    assert row.seconds
