"""Comparisons of other papers, against their formulas by hand."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from grpo_trainer.experience import ADVANTAGES, PassAtK, maxrl, reinforce_plus_plus, rloo
from grpo_trainer.experience.comparisons import advantages_of
from tests.trainer.features import resumable

REWARDS = torch.tensor([[1.0], [0.0], [0.0], [1.0], [3.0], [0.5], [0.0], [0.0]])
ONE = torch.ones(1)


def groups(values: torch.Tensor) -> list[list[float]]:
    return values.reshape(-1, 4).tolist()


def test_rloo() -> None:
    for found, own in zip(groups(rloo(REWARDS, ONE, 4)), groups(REWARDS), strict=True):
        expected = [r - (sum(own) - r) / 3 for r in own]
        assert found == pytest.approx(expected, abs=1e-6)


def test_reinforce_plus_plus() -> None:
    centred = [r - sum(own) / 4 for own in groups(REWARDS) for r in own]
    mean = sum(centred) / 8
    std = math.sqrt(sum((x - mean) ** 2 for x in centred) / 7)
    found = reinforce_plus_plus(REWARDS, ONE, 4).tolist()
    assert found == pytest.approx([(x - mean) / (std + 1e-4) for x in centred], abs=1e-5)


def test_maxrl() -> None:
    for found, own in zip(groups(maxrl(REWARDS, ONE, 4)), groups(REWARDS), strict=True):
        mean = sum(own) / 4
        assert found == pytest.approx([(r - mean) / mean for r in own], abs=1e-5)
    assert not maxrl(torch.zeros(4, 1), ONE, 4).any()


@pytest.mark.parametrize("k", (1, 2, 3))
@pytest.mark.parametrize("passed", range(6))
@pytest.mark.parametrize("unknown", (0, 1))
def test_pass_at_k(k: int, passed: int, unknown: int) -> None:
    """The mean over all sets of k that a completion is in, relative to that of all sets."""
    own = [1.0] * passed + [0.0] * (5 - passed)
    rewards = [torch.nan] * unknown + own  # which is left out
    sets = list(combinations(range(5), k))
    best = [max(own[i] for i in each) for each in sets]
    mean = sum(best) / len(sets)
    spread = math.sqrt(sum((value - mean) ** 2 for value in best) / len(sets))
    expected = []
    for i in range(5):
        mine = [value for each, value in zip(sets, best, strict=True) if i in each]
        expected.append((sum(mine) / len(mine) - mean) / spread if spread else 0.0)
    found = PassAtK(k)(torch.tensor(rewards)[:, None], ONE, len(rewards)).tolist()
    assert found == pytest.approx([0.0] * unknown + expected, abs=1e-6)


def test_pass_at_k_of_fewer_rewards() -> None:
    """Two that have one are compared by what both earn."""
    rewards = torch.tensor([torch.nan, 1.0, 0.0, torch.nan])[:, None]
    assert not PassAtK(3)(rewards, ONE, 4).any()  # one passes with the other, and alone
    assert PassAtK(1)(rewards, ONE, 4).tolist() == [0, 1, -1, 0]


def test_rewards_that_do_not_apply() -> None:
    rewards = torch.tensor([[1.0, torch.nan], [torch.nan, torch.nan], [0.0, 2.0], [0.0, 0.0]])
    for function in (*ADVANTAGES.values(), PassAtK(2)):
        found = function(rewards, torch.tensor([1.0, 0.5]), 4)
        assert found.isfinite().all()
    assert rloo(rewards, torch.tensor([1.0, 0.5]), 4)[1] == 0


def test_by_name(tmp_path) -> None:
    assert advantages_of("pass_at_3") == PassAtK(3) and advantages_of("rloo") is rloo
    for name in ("reinforce_plus_plus", "pass_at_2"):
        resumable({"advantages": name, "max_steps": 1}, tmp_path / name).train()
    with pytest.raises(ValueError, match="advantages: expected a function or one of rloo, .*'ppo'"):
        resumable({"advantages": "ppo"}, tmp_path / "wrong")
    with pytest.raises(ValueError, match="k: expected an integer >= 1, got 0"):
        PassAtK(0)
    with pytest.raises(ValueError, match="expected groups of at least k = 3 completions, got 2"):
        PassAtK(3)(REWARDS, ONE, 2)
