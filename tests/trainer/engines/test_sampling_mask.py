"""use_sampling_mask: what the sampling filters left, from the engine to the loss."""

from __future__ import annotations

import copy

import pytest
import torch

from grpo_trainer.engines import Completions, Sampling
from grpo_trainer.engines.base import vllm_params
from grpo_trainer.vllm import ServerError
from tests.support.trainer import BackgroundEngine, generating, mask_ids
from tests.support.vllm_stub import choices
from tests.trainer.engines.test_rollout_client import COMPLETE

FILTERS = [
    {"top_k": 3},
    {"top_k": 1},
    {"top_k": 8, "top_p": 0.6, "temperature": 0.7},
    {"top_k": 8, "min_p": 0.4},
    {"top_k": 400},
]


@pytest.fixture
def sharp(policy):
    """Return a policy whose distributions are far from uniform."""
    with torch.no_grad():
        policy.lm_head.weight.mul_(20)
    return policy.eval()


@pytest.mark.parametrize("filters", FILTERS)
def test_what_the_filters_leave(sharp, tokenizer, make_args, filters):
    engine = generating(sharp, tokenizer)
    prompts = [[3, 4, 5, 13], [7, 13], [7, 13]]
    found = []
    for use in (False, True):
        sampling = Sampling.from_config(make_args(use_sampling_mask=use, **filters), tokenizer)
        torch.manual_seed(3)
        found.append(engine.generate(prompts, sampling))
    plain, masked = found
    ids, mask = masked.token_ids, masked.sampling_mask
    assert plain.sampling_mask is None
    assert plain.token_ids == ids  # the same tokens at the same seed
    for prompt, row, sets in zip(prompts, ids, mask, strict=True):
        with torch.no_grad():
            logits = sharp(input_ids=torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1]
        assert len(row) == len(sets)
        for token, at, left in zip(row, logits, sets, strict=True):
            assert token in left and set(left) == mask_ids(at, **filters)


class FilteringEngine(BackgroundEngine):
    """Samples by filters, and may keep to itself what they left."""

    def __init__(self, tokenizer, model, reports: bool = True) -> None:
        super().__init__(tokenizer, model, masks=True)
        self._reports = reports

    def generate(self, prompt_ids, sampling) -> Completions:
        found = super().generate(prompt_ids, sampling)
        return found if self._reports else found._replace(sampling_mask=None)


@pytest.mark.parametrize("use", [True, False])
def test_the_policy_its_reference_and_the_engine_mean_the_same(
    make_trainer, policy, tokenizer, use
):
    engine = FilteringEngine(tokenizer, copy.deepcopy(policy), reports=use)
    trainer = make_trainer(engine=engine, top_k=2, use_sampling_mask=use, beta=0.1)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    differences = [row["sampling/sampling_logp_difference/max"] for row in logs]
    assert max(differences) < 1e-5 if use else min(differences) > 0.1
    assert logs[0]["kl"] == pytest.approx(0, abs=1e-6)


def test_an_engine_that_does_not_report_them(make_trainer, tokenizer):
    engine = FilteringEngine(tokenizer, None, reports=False)
    with pytest.raises(ValueError, match="use_sampling_mask: .*none from FilteringEngine"):
        make_trainer(engine=engine, top_k=2, use_sampling_mask=True).train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "use_sampling_mask: expected top_k >= 1 .*got 0"),
        ({"top_k": 5, "generation_kwargs": {"top_k": 0}}, "expected top_k >= 1 .*got 0"),
        ({"top_k": 5, "generation_kwargs": {"typical_p": 0.5}}, "expected no typical_p"),
    ],
)
def test_wrong_settings(make_args, tokenizer, policy, changes, message):
    def generate() -> None:
        sampling = Sampling.from_config(make_args(use_sampling_mask=True, **changes), tokenizer)
        generating(policy, tokenizer).generate([[3]], sampling)

    with pytest.raises(ValueError, match=message):
        generate()


def test_in_vllms_words(make_args, tokenizer):
    for top_k, logprobs in ((3, 11), (100, len(tokenizer))):  # room for ties
        args = make_args(use_vllm=True, top_k=top_k, use_sampling_mask=True)
        assert vllm_params(Sampling.from_config(args, tokenizer))["logprobs"] == logprobs
    with pytest.warns(UserWarning, match="top_k: .*use_sampling_mask removes the difference"):
        make_args(use_vllm=True, top_k=5)


def test_what_a_server_answers(make_client, stub):
    def answer(sets):
        made = choices([[1]], 1)
        made[0]["logprobs"]["top_logprobs"] = sets
        return 200, {"choices": made}

    sets = [{"token_id:7": -0.5, "token_id:3": -9999.0, "token_id:2": -2.0}, {"token_id:0": 0.0}]
    stub.script[COMPLETE] = [answer(sets), answer(sets[:1])]
    client = make_client()
    assert client.generate([[1]], logprobs=2)["sampling_mask"] == [[[7, 2], [0]]]
    with pytest.raises(ServerError, match="one sampling mask per token, got 1 for 2"):
        client.generate([[1]], logprobs=2)
