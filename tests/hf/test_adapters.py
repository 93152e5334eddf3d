"""Adapters on a transformers model's head, and beside it: the fused head equals the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_kernels.hf import add_fused_head, check_fused_head, keep_head_in_fp32
from tests.hf.test_families import (
    assert_head_equals_own_logits,
    head_in_use,
    tiny_model,
    tokens,
)


def adapted(family: str, **lora: object) -> PreTrainedModel:
    """Return a model under LoRA, with weights that make a difference."""
    peft = pytest.importorskip("peft")
    model = tiny_model(family)
    add_fused_head(model)
    settings = {"r": 3, "lora_alpha": 7, "task_type": "CAUSAL_LM"} | lora
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return wrapped.eval()


ADAPTED = {
    "layers": dict(target_modules=["q_proj", "down_proj"]),
    "head": dict(target_modules=["q_proj", "lm_head"]),
    "head, rslora": dict(target_modules=["lm_head"], use_rslora=True),
    "whole head": dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "embedding": dict(target_modules=["q_proj", "embed_tokens"]),
    "tied": dict(target_modules=["q_proj", "lm_head"], ensure_weight_tying=True),
}


@pytest.mark.filterwarnings("ignore")  # peft's, on tied weights
@pytest.mark.parametrize("family", ["llama", "qwen2", "cohere"])  # the last two are tied
@pytest.mark.parametrize("lora", ADAPTED)
def test_adapters_wherever_they_are(family: str, lora: str) -> None:
    model = adapted(family, **ADAPTED[lora])
    assert_head_equals_own_logits(model)
    check_fused_head(model.get_base_model())
    with model.disable_adapter():
        assert_head_equals_own_logits(model)


def test_an_adapter_is_not_merged() -> None:
    """Small updates of a bf16 head would be rounded away."""
    base = adapted("llama", target_modules=["lm_head"]).get_base_model().bfloat16()
    head = head_in_use(base)
    assert head.weight is base.lm_head.base_layer.weight and head.lora is not None


@pytest.mark.filterwarnings("ignore")  # peft's, on a second adapter
def test_several_active_adapters_are_one() -> None:
    peft = pytest.importorskip("peft")
    model = adapted("llama", target_modules=["lm_head"])
    second = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["lm_head"], task_type="CAUSAL_LM")
    model.add_adapter("second", second)
    base = model.get_base_model()
    torch.nn.init.normal_(base.lm_head.lora_B["second"].weight, std=0.1)
    model.base_model.set_adapter(["default", "second"])
    lora = head_in_use(base).lora
    assert lora is not None and lora.rank == 5
    assert_head_equals_own_logits(model)
    check_fused_head(base)
    model.base_model.set_adapter("second")
    assert_head_equals_own_logits(model)
    model.merge_adapter()
    assert head_in_use(base).lora is None
    assert_head_equals_own_logits(model)


def test_an_fp32_head_stays_one_under_an_adapter() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama").bfloat16()
    keep_head_in_fp32(model)
    add_fused_head(model)
    config = peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    ids, _ = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        seen = model(input_ids=ids, head_fn=lambda hidden, head: hidden.dtype).head
    assert seen == torch.float32


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        ("Lora", dict(lora_dropout=0.1), "lora_dropout=0.1"),
        ("Lora", dict(use_dora=True), "DoRA"),
        ("Lora", dict(target_modules=["q_proj"], trainable_token_indices={"lm_head": [3]}),
         "single tokens"),
        ("LoHa", {}, "adapter of type"),
    ],
)  # fmt: skip
def test_what_is_refused(kind: str, settings: dict[str, Any], problem: str) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    add_fused_head(model)
    settings = {"target_modules": ["lm_head"], "task_type": "CAUSAL_LM", **settings}
    wrapped = peft.get_peft_model(model, getattr(peft, f"{kind}Config")(**settings))
    with pytest.raises(ValueError, match=problem):
        head_in_use(wrapped.get_base_model())
