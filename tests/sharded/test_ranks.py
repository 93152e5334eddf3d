"""Real ranks: heads split over the vocabulary or sharded by FSDP2, sequences cut over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sharded import head_cases, sequence_cases, vocab_cases
from tests.sharded.ranks import Cases, run_on_ranks

KINDS = {"vocabulary": vocab_cases, "FSDP2": head_cases, "sequences": sequence_cases}


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases,size",
    [
        pytest.param(kind.cases, size, id=f"{name}-{size}")
        for name, kind in KINDS.items()
        for size in (2, 4, 8)
        if size < 8 or kind is sequence_cases  # these alone have three ways to share
    ],
)
def test_ranks_equal_one_process(cases: Cases, size: int, tmp_path: Path) -> None:
    """Run all cases in one launch: a process takes longer to start than to run them."""
    verdicts = run_on_ranks(cases, size, tmp_path)
    assert {name: verdict for name, verdict in verdicts.items() if verdict} == {}
