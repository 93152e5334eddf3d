"""Speculative decoding: the completions are the policy's, and the drafts are counted."""

from __future__ import annotations

import json

import pytest
import torch

from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.task import digits_reversal_reward
from grpo_trainer.vllm.speculative import counts_of_engine, counts_of_server
from tests.vllm.vllm_helpers import (
    CLOSE,
    ENGINE,
    adapted,
    apart,
    change,
    make_model,
    quantized,
    serving,
)

DRAFTED = 2


def drafter(folder: str) -> dict[str, object]:
    return {"method": "draft_model", "model": folder, "num_speculative_tokens": DRAFTED}


def expanded(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """Do what vLLM's function says, which leaves its output as it was on a CPU."""
    rows = x.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)))
    assert len(rows) == num_tokens
    return torch.where(rows == replace_from, replace_to, rows)


def test_parity(make_sampler, rounded, monkeypatch):
    """With the kernel corrected that is wrong on a CPU: what is kept is drawn as the policy's."""
    policy = adapted(quantized(rounded))
    options = {"vllm_engine_kwargs": ENGINE | {"speculative_config": drafter(rounded)}}
    monkeypatch.setattr("vllm.v1.sample.rejection_sampler.expand_batch_to_tokens", expanded)
    sampler = make_sampler(policy, **options)
    assert apart(sampler, policy) < CLOSE
    before = counts_of_engine(sampler.engine._llm)
    assert 0 < before.accepted_tokens <= before.draft_tokens <= DRAFTED * before.drafts
    change(policy)  # the drafter goes stale, the completions do not
    assert apart(sampler, policy) < CLOSE
    assert counts_of_engine(sampler.engine._llm).drafts > before.drafts


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's sampler is wrong only on CPUs")
def test_a_cpu_is_refused(make_sampler, rounded):
    options = {"vllm_engine_kwargs": ENGINE | {"speculative_config": drafter(rounded)}}
    with pytest.raises(ValueError, match=r"device \(cpu\), where vLLM then samples at wrong temp"):
        make_sampler(adapted(quantized(rounded)), **options)


@pytest.mark.slow
def test_a_server(make_args, tokenizer, dataset, tmp_path):
    """It has counted what it drafted; a run on a CPU ends before it starts."""
    model = make_model(tokenizer, tied=False)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "drafter")
    config = json.dumps(drafter(str(tmp_path / "drafter")))
    with serving(tmp_path, model, tokenizer, {"--speculative-config": config}) as server:
        client = server.connected()
        client.generate([[3, 4, 5]], temperature=0.0, max_tokens=12, logprobs=None)
        counts = counts_of_server(client.server.ask("GET", "/metrics"))
        client.close()
        # the drafter is the policy, and nothing is drawn at random
        assert counts.draft_tokens == counts.accepted_tokens == DRAFTED * counts.drafts > 0
        if torch.cuda.is_available():
            return
        with pytest.raises(ValueError, match="the server's --speculative-config: expected none"):
            GRPOTrainer(
                model=model,
                reward_funcs=digits_reversal_reward,
                args=make_args(vllm_server_port=server.port),
                train_dataset=dataset,
                processing_class=tokenizer,
            )
