"""Real ranks: heads split over the vocabulary or sharded, sequences cut over ranks."""

from __future__ import annotations

import pytest

from tests.sharded import head_cases, sequence_cases, vocab_cases, zero_cases
from tests.sharded.ranks import Cases, run_on_ranks

pytestmark = pytest.mark.slow

KINDS = {"vocabulary": vocab_cases, "FSDP2": head_cases, "sequences": sequence_cases}


@pytest.mark.parametrize(
    "cases,size",
    [
        pytest.param(kind.cases, size, id=f"{name}-{size}")
        for size in (4, 2)  # one after the other: those of a size share processes
        for name, kind in KINDS.items()
        if (name, size) != ("vocabulary", 2)
    ],
)
def test_ranks_equal_one_process(cases: Cases, size: int) -> None:
    verdicts = run_on_ranks(cases, size)
    assert {name: verdict for name, verdict in verdicts.items() if verdict} == {}


@pytest.mark.deepspeed
def test_zero_equals_one_process() -> None:
    pytest.importorskip("deepspeed")
    verdicts = run_on_ranks(zero_cases.cases, 2)
    assert {name: verdict for name, verdict in verdicts.items() if verdict} == {}
