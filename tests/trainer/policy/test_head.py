"""The head as the configuration chooses: a bounded backward, and GEMMs of fp32 numbers."""

from __future__ import annotations

import copy

import pytest
import torch

from grpo_kernels.hf import add_fused_head
from grpo_trainer.policy import load_policy
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


IDS = torch.tensor([[3, 4, 5, 6]])


def what_the_head_gets(model):
    add_fused_head(model)
    seen = []

    def head_fn(hidden, head):
        seen.extend((hidden.dtype, head.weight.dtype, torch.is_autocast_enabled("cpu")))
        return hidden @ head.weight.T

    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=IDS, head_fn=head_fn).head
    return seen, logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_fp32(policy, make_args, dtype):
    own = what_the_head_gets(load_policy(policy.to(dtype), make_args()))
    assert own[0] != [torch.float32, torch.float32, False]
    kept = load_policy(policy, make_args(cast_lm_head_to_fp32=True))
    seen, logits = what_the_head_gets(kept)
    assert seen == [torch.float32, torch.float32, False]
    assert logits.dtype == torch.float32
    assert kept.model.embed_tokens.weight.dtype == dtype
    assert kept.generate(IDS, max_new_tokens=2, do_sample=False).shape[1] <= 6


def test_tied_heads(policy, make_args):
    args = make_args(cast_lm_head_to_fp32=True)
    policy.lm_head.weight = policy.model.embed_tokens.weight
    load_policy(policy, args)  # fp32 as it is
    with pytest.raises(ValueError, match="tied head in"):
        load_policy(policy.to(torch.bfloat16), args)
