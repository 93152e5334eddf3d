"""The load-balancing loss of mixture-of-experts models."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig

from tests.support.trainer import CannedEngine

TINY = {
    "vocab_size": 14,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}


MIXTRAL = MixtralConfig(num_local_experts=4, **TINY)
QWEN2_MOE = Qwen2MoeConfig(
    num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, **TINY
)


@pytest.mark.parametrize("config", [MIXTRAL, QWEN2_MOE], ids=["mixtral", "qwen2_moe"])
def test_the_models_own_loss_is_added(make_trainer, config):
    model = AutoModelForCausalLM.from_config(config)
    settings = {"max_steps": 1, "learning_rate": 0.0, "router_aux_loss_coef": 0.5}
    # equal rewards: the policy loss is 0
    trainer = make_trainer(
        lambda prompts, **kwargs: [1.0] * len(prompts), model, CannedEngine(), **settings
    )
    trainer.train()
    [log] = [row for row in trainer.state.log_history if "aux_loss" in row]
    [batch] = trainer._buffer
    with torch.no_grad():
        output = model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            output_router_logits=True,
        )
    assert log["aux_loss"] == pytest.approx(output.aux_loss.item(), rel=1e-5)
    assert log["loss"] == pytest.approx(0.5 * log["aux_loss"], rel=1e-5)
    assert log["grad_norm"] > 0


@pytest.mark.parametrize(("coef", "expected"), [(None, 0.001), (0.0, 0.0)])
def test_default_weight_is_the_models(make_trainer, coef, expected):
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    trainer = make_trainer(model=model, router_aux_loss_coef=coef, max_steps=1)
    assert trainer._router_coef == expected
    trainer.train()
    [log] = [row for row in trainer.state.log_history if "loss" in row]
    assert ("aux_loss" in log) == (expected > 0)
