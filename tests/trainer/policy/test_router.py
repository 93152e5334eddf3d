"""The load-balancing loss of mixture-of-experts models."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig

from grpo_kernels.hf import has_moe_aux_loss
from tests.support.batches import BatchTrainer
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
@pytest.mark.parametrize(("coef", "used"), [(0.5, 0.5), (None, 0.001), (0.0, 0.0)])
def test_the_models_own_loss_is_added(make_trainer, config, coef, used):
    """By the weight of its config where there is no other."""
    trainer = make_trainer(
        lambda prompts, **kwargs: [1.0] * len(prompts),  # equal rewards: the policy loss is 0
        AutoModelForCausalLM.from_config(config), CannedEngine(), BatchTrainer,
        max_steps=1, learning_rate=0.0, router_aux_loss_coef=coef,
    )  # fmt: skip
    trainer.train()
    [log] = [row for row in trainer.state.log_history if "loss" in row]
    assert ("aux_loss" in log) == (log["grad_norm"] > 0) == (used > 0)
    if used:
        [batch] = trainer.batches
        given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        with torch.no_grad():
            expected = trainer.model(**given, output_router_logits=True).aux_loss.item()
        assert log["aux_loss"] == pytest.approx(expected, rel=1e-5)
        assert log["loss"] == pytest.approx(used * expected, rel=1e-4)


def test_a_class_that_fsdp2_makes_of_a_model():
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    model.__class__ = type("FSDPMixtral", (type(model),), {"__module__": "torch.nn"})
    assert has_moe_aux_loss(model)
