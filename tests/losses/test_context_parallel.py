"""Sequences that lie on several ranks: targets and the rows of a rank. Losses: tests/sharded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from grpo_kernels import (
    LossConfig,
    TokenBatch,
    context_parallel_rows,
    explain,
    linear_policy_loss,
    next_token_targets,
)
from grpo_kernels.batch.segments import SequenceGroup


def test_what_cannot_be_with_a_sequence_group() -> None:
    batch = TokenBatch.from_padded(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2))
    group = SequenceGroup(group=dist.GroupMember.WORLD, counts=batch.counts, on_device=batch.counts)
    batch = replace(batch, sequence_group=group)
    hidden, weight = torch.zeros(2, 3, 6), torch.zeros(19, 6, requires_grad=True)
    sequences, tokens = LossConfig(loss_type="gspo"), LossConfig(loss_type="bnpo")
    said = str(explain(hidden, weight, batch, sequences))
    assert "two_pass: in a sequence_group, sums over sequences need every rank's forward" in said
    assert explain(hidden, weight, batch, tokens).schedule == "one_pass"
    with pytest.raises(
        ValueError,
        match="'one_pass' cannot run: in a sequence_group, sums over sequences need every",
    ):
        explain(hidden, weight, batch, sequences, schedule="one_pass")
    with pytest.raises(ValueError, match="sequence_group: expected None to cut a batch"):
        batch.narrow(0, 3)
    compiled = torch.compile(linear_policy_loss, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="sequence_group: expected None inside torch.compile"):
        compiled(hidden, weight, batch, tokens)


def test_targets_end_with_their_sequence() -> None:
    cu_seqlens = torch.tensor([0, 0, 3, 3, 4, 7, 7])
    ids = torch.tensor([4, 5, 6, 7, 8, 9, 1])
    expected = [5, 6, -100, -100, 9, 1, -100]
    assert next_token_targets(ids, cu_seqlens).tolist() == expected
    assert next_token_targets(ids, cu_seqlens.int()).tolist() == expected
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1])  # the first of a sequence is nobody's target
    masked = next_token_targets(ids, cu_seqlens, mask)
    assert masked.tolist() == [-100, 6, -100, -100, -100, 1, -100]
    padded = next_token_targets(ids[:6].view(2, 3), mask=mask[:6].view(2, 3))
    assert padded.tolist() == [[-100, 6, -100], [8, -100, -100]]
    empty = torch.zeros(0, dtype=torch.int64)
    assert next_token_targets(empty, torch.tensor([0, 0])).shape == (0,)


def test_rows_by_hand() -> None:
    cu_seqlens = torch.tensor([0, 8, 8, 24])
    rows, own = context_parallel_rows(cu_seqlens, rank=1, size=2)
    assert rows.tolist() == [2, 3, 4, 5, *range(12, 20)]
    assert own.tolist() == [0, 4, 4, 12]
    rows, own = context_parallel_rows(cu_seqlens, rank=0, size=4)
    assert rows.tolist() == [0, 7, 8, 9, 22, 23]
    rows, own = context_parallel_rows(cu_seqlens, rank=0, size=3, layout="contiguous")
    assert rows.tolist() == list(range(8))
    assert own.tolist() == [0, 8, 8, 8]


@pytest.mark.parametrize(
    "offsets,layout,message",
    [
        ([0, 8, 14], "head_tail", "multiples of 2 .* = 4 .*got 6 of sequence 1"),
        ([0, 9], "contiguous", "multiple of size = 2 .*9"),
    ],
)
def test_sequences_that_cannot_be_cut(offsets: list[int], layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        context_parallel_rows(torch.tensor(offsets), rank=0, size=2, layout=layout)
