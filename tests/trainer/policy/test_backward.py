"""The backward of the head that the configuration chooses: what it logs and what it changes."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.trainer import CannedEngine, lengths_reward, parameters

NAMES = {f"backward_{name}" for name in ("entries", "whole_rows", "error", "error_bound")}
TOLERANCE = 1e-2


@pytest.fixture
def train(make_trainer, policy):
    """Train a copy of a policy with more columns than a row needs entries, on given completions."""
    policy.resize_token_embeddings(600, mean_resizing=False)
    with torch.no_grad():
        policy.lm_head.weight.mul_(40)  # peaked, as a policy that was trained

    def run(**changes):
        settings = {"max_steps": 2, "gradient_accumulation_steps": 2} | changes
        trainer = make_trainer(
            lengths_reward, model=copy.deepcopy(policy), **settings, engine=CannedEngine()
        )
        trainer.train()
        return [row for row in trainer.state.log_history if "reward" in row], trainer.model

    return run


@pytest.mark.parametrize("exact_weight", [False, True])
def test_a_tolerance(train, exact_weight):
    exact, expected = train()
    tolerance = {"backward": "sparse", "backward_tolerance": TOLERANCE}
    bounded = {**tolerance, "backward_exact_weight": exact_weight}
    rows, model = train(**bounded)
    assert not NAMES & set().union(*exact)
    for row in rows:
        assert 0 < row["backward_error"] <= TOLERANCE and row["backward_error_bound"] > 0
        assert 1 < row["backward_entries"] < 300 and row["backward_whole_rows"] < 1
    # the first step's loss is that of the same weights; later ones have other gradients behind them
    assert rows[0]["loss"] != 0 and rows[0]["loss"] == pytest.approx(exact[0]["loss"], rel=1e-5)
    assert rows[0]["grad_norm"] == pytest.approx(exact[0]["grad_norm"], rel=2 * TOLERANCE)
    assert not torch.equal(parameters(model), parameters(expected))
    assert torch.equal(parameters(model), parameters(train(**bounded)[1]))  # a run is repeatable
