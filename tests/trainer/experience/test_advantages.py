from __future__ import annotations

import pytest
import torch

from grpo_trainer.experience import compute_advantages

NAN = float("nan")
ONE = torch.ones(1)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def test_group():
    rewards = column(1.0, 0.0, 0.5, 3.0, 3.0, 3.0)
    out = compute_advantages(rewards, ONE, 3)
    first = rewards[:3, 0]
    expected = (first - first.mean()) / (first.std() + 1e-4)
    torch.testing.assert_close(out.advantages, torch.cat([expected, torch.zeros(3)]))
    assert out.zero_std.tolist() == [False] * 3 + [True] * 3
    torch.testing.assert_close(out.rewards, rewards[:, 0])


def test_batch_and_none():
    rewards = torch.randn(8, 1)
    centred = (rewards.view(2, 4) - rewards.view(2, 4).mean(1, keepdim=True)).view(-1)
    batch = compute_advantages(rewards, ONE, 4, scale="batch")
    torch.testing.assert_close(batch.advantages, centred / (rewards.std() + 1e-4))
    plain = compute_advantages(rewards, ONE, 4, scale="none")
    torch.testing.assert_close(plain.advantages, centred)


def test_weighted_sum_ignores_nan():
    rewards = torch.tensor([[1.0, 2.0], [NAN, 1.0], [0.0, NAN], [NAN, NAN]])
    out = compute_advantages(rewards, torch.tensor([1.0, 0.5]), 4, scale="none")
    totals = torch.tensor([2.0, 0.5, 0.0])
    torch.testing.assert_close(out.rewards[:3], totals)
    assert out.rewards[3].isnan()
    expected = torch.cat([totals - totals.mean(), torch.zeros(1)])
    torch.testing.assert_close(out.advantages, expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_no_information_gives_zero(scale, aggregation):
    rewards = torch.tensor([[NAN], [NAN], [1.0], [NAN], [2.0], [2.0]])
    out = compute_advantages(rewards, ONE, 2, scale, aggregation)
    torch.testing.assert_close(out.advantages, torch.zeros(6))


def test_infinite_reward_stays_finite():
    out = compute_advantages(column(torch.inf, 0.0, 1.0, 2.0), ONE, 2)
    assert out.advantages.isfinite().all()


def test_normalize_then_sum():
    rewards, weights = torch.randn(6, 2), torch.tensor([1.0, 2.0])
    grouped = rewards.view(2, 3, 2)
    normal = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    total = (normal.view(6, 2) * weights).sum(1)
    expected = (total - total.mean()) / (total.std() + 1e-4)
    out = compute_advantages(rewards, weights, 3, aggregation="normalize_then_sum")
    torch.testing.assert_close(out.advantages, expected)


def test_group_of_one():
    out = compute_advantages(column(1.0, 2.0), ONE, 1)
    assert out.advantages.tolist() == [0.0, 0.0]
