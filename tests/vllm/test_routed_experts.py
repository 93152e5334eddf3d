"""Routing replay with vLLM: it reports the experts of each token, where it can."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_trainer import GRPOTrainer
from tests.vllm.vllm_helpers import ENGINE

ON_GPU = torch.cuda.is_available()


def make_mixture(tokenizer) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, moe_intermediate_size=64,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        num_experts=8, num_experts_per_tok=2, max_position_embeddings=128, initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, mlp_only_layers=[1],
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


@pytest.fixture
def train(make_args, tokenizer, dataset):
    def run(**changes) -> dict[str, float]:
        """Return what the first step logs, with vLLM in bf16."""
        engine = ENGINE | {"dtype": "bfloat16"}
        args = make_args(max_steps=1, vllm_engine_kwargs=engine, **changes)
        trainer = GRPOTrainer(
            make_mixture(tokenizer),
            lambda completions, **kwargs: [float(i % 2) for i, _ in enumerate(completions)],
            args,
            dataset,
            processing_class=tokenizer,
        )
        trainer.train()
        trainer.rollouts.close()
        return next(row for row in trainer.state.log_history if "loss" in row)

    return run


@pytest.mark.skipif(ON_GPU, reason="vLLM reports them on a GPU")
def test_on_a_cpu_vllm_says_that_it_reports_none(train):
    """It reports by its second model runner, which needs Triton."""
    with pytest.raises(ValueError, match="Model Runner V2"):
        train(use_rollout_routing_replay=True)


@pytest.mark.skipif(not ON_GPU, reason="vLLM reports them on a GPU only")
def test_engine_and_policy_differ_less(train):
    own, replayed = (train(use_rollout_routing_replay=replays) for replays in (False, True))
    assert replayed["sampling/routing_difference"] < 0.3
    name = "sampling/sampling_logp_difference/mean"
    assert replayed[name] <= own[name]
