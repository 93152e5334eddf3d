"""Real ranks: heads split over the vocabulary or sharded, sequences cut over ranks."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from tests.sharded import head_cases, sequence_cases, vocab_cases, zero_cases
from tests.sharded.ranks import Cases, run_on_ranks
from tests.support import launch

pytestmark = pytest.mark.slow

KINDS = {"vocabulary": vocab_cases, "FSDP2": head_cases, "sequences": sequence_cases}


@pytest.mark.parametrize(
    "cases,size",
    [
        pytest.param(kind.cases, size, id=f"{name}-{size}")
        for size in (8, 4, 2)  # one after the other: those of a size share processes
        for name, kind in KINDS.items()
        if size < 8 or kind is sequence_cases  # these alone have three ways to share
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


def _one_fails(status: int | None) -> None:
    if dist.get_rank() == 1:
        if status is not None:
            os._exit(status)
        print("what came before")
        raise KeyError("of one rank")
    dist.barrier()


@pytest.mark.parametrize(
    "status,said", [(None, "KeyError: 'of one rank'"), (3, "has ended with status 3")]
)
def test_the_rank_that_failed_first_is_named(status: int | None, said: str) -> None:
    with launch.ranks(2, grace=1.0) as group:
        assert group.run(dist.get_rank) == [0, 1]
        with pytest.raises(launch.RanksFailedError, match="rank 0: ") as caught:
            group.run(_one_fails, status)
    first, _ = str(caught.value).split("rank 0: ")
    assert first.startswith("rank 1: ") and said in first
    assert ("what came before" in str(caught.value)) == (status is None)
