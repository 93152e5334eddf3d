"""A head over several ranks: ``python -m pytest benchmarks/test_sharded.py --benchmark-only``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.check import against
from benchmarks.child import ask
from benchmarks.conftest import Session
from benchmarks.results import Row
from benchmarks.shapes import Entry, entry
from benchmarks.sharded import ARMS

_ROUNDS = 3
_LONGEST = 1800.0  # seconds


@dataclass(frozen=True)
class Sharded(Entry):
    """A case on several processes of this machine, a thread each."""

    ranks: int = 2

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "ranks": self.ranks}


def _sharded(model: str, tokens: int, dtype: str) -> Sharded:
    return Sharded(entry("dapo", model, tokens, dtype).case)


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
    """Time every arm in one launch, in turns; then its memory in one of its own."""
    posed, rounds = case.case, 1 if session.suite == "tiny" else _ROUNDS
    words = [posed.model.name, str(posed.tokens), posed.dtype, posed.work.name]

    def ranks(rounds: int, *words: str) -> dict[str, Any]:
        return ask("benchmarks.sharded", [str(case.ranks), str(rounds), *words], _LONGEST)

    found = ranks(rounds, *words)
    rows = {arm: Row(arm, ARMS[arm].note) for arm in names}
    rows |= {row["provider"]: Row(**row) for row in found.get("rows", ())}
    for arm, row in rows.items():
        row.leave_out("wrong", found.get("failure"))
        if row.runs and not session.brief:
            said = ranks(1, *words, arm)
            row.info |= {name: said[name] for name in ("grown_bytes",) if name in said}
    return [rows[arm] for arm in names]


def about(case: Sharded, device: str) -> str:
    return against(case.case, device)


def test_sharded(row: Row) -> None:
    """Time a step over several ranks."""
    assert row.seconds
