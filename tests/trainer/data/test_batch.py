"""Micro-batches: what the host knows of them spares a step every wait for a device."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import LossConfig, linear_policy_loss
from grpo_trainer.data import Divisors, MicroBatch, Sample, collate
from tests.support.host_reads import counted_reads

NONE = {"lengths": None, "active_lengths": None}


def collated(per_token: bool = False) -> MicroBatch:
    """Return completions of which one has an answer of a tool, and one is left out."""
    samples = [
        Sample("", [1, 2], completion_ids=[3, 4, 5], env_mask=[1, 0, 1]),
        Sample("", [1], completion_ids=[6, 7]),
        Sample("", [1, 2, 3], completion_ids=[8], left_out=True),
        Sample("", [1, 2], completion_ids=[9, 4]),
    ]
    advantages = torch.tensor([1.0, 0.0, 2.0, -1.0])
    if per_token:
        advantages = advantages[:, None] * torch.tensor([[1.0, 0.0, 0.0]])
    return collate(
        samples, advantages, Divisors(torch.tensor(6.0), torch.tensor(6.0)), pad_token_id=0
    )


@pytest.mark.parametrize("per_token,active", [(False, [2, 0, 0, 2]), (True, [1, 0, 0, 1])])
def test_the_host_knows_the_counts(per_token: bool, active: list[int]) -> None:
    batch = collated(per_token)
    assert (batch.lengths, batch.active_lengths) == ([2, 2, 0, 2], active)
    told, read = (one.token_batch(2) for one in (batch, MicroBatch(**vars(batch) | NONE)))
    assert (told.lengths, told.active_lengths) == (read.lengths, read.active_lengths)


@pytest.mark.parametrize("known", (False, True))
def test_a_step_reads_nothing_that_the_host_knows(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    batch = collated()
    batch = batch if known else MicroBatch(**vars(batch) | NONE)
    hidden = torch.randn(*batch.target.shape, 8, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    with counted_reads(monkeypatch) as reads:
        tokens = batch.token_batch(2)
        linear_policy_loss(hidden, weight, tokens, LossConfig()).loss.backward()
    assert reads == ([] if known else ["cpu"])


def test_wrong_counts_are_an_error() -> None:
    batch = MicroBatch(**vars(collated()) | {"lengths": [2, 2, 1, 2]})
    with pytest.raises(ValueError, match="^lengths: expected"):
        batch.token_batch(1)
