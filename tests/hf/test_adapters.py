"""Adapters on a transformers model's head, and beside it: the fused head equals the model's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_kernels.hf import add_fused_head, check_fused_head, keep_head_in_fp32
from tests.hf.test_families import (
    assert_head_equals_own_logits,
    head_in_use,
    logprobs_fn,
    tiny_model,
    tokens,
)


def adapted(family: str, dtype: torch.dtype = torch.float32, **lora: object) -> PreTrainedModel:
    """Return a model under LoRA, with weights that make a difference."""
    peft = pytest.importorskip("peft")
    model = tiny_model(family).to(dtype)
    add_fused_head(model)
    settings = {"r": 3, "lora_alpha": 7, "task_type": "CAUSAL_LM"} | lora
    config = copy.deepcopy(peft.LoraConfig(**settings))  # PEFT writes into its lists
    wrapped = peft.get_peft_model(model, config)
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
    "whole ends, tied": dict(
        target_modules=["q_proj"], modules_to_save=["lm_head"], ensure_weight_tying=True
    ),
    "tokens": dict(target_modules=["q_proj"], trainable_token_indices=[5, 98]),
    "a token of the head": dict(
        target_modules=["q_proj"], trainable_token_indices={"lm_head": [7]}
    ),
    "other tokens of each end": dict(
        target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3], "lm_head": [4, 0]}
    ),
    "tokens and head": dict(target_modules=["lm_head"], trainable_token_indices=[5, 98]),
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


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("ids", [[98], [1, 57, 3]])
@pytest.mark.parametrize("length", [2, 9])  # of one, and of eight log-probabilities
def test_trained_tokens_in_fp64(family: str, ids: list[int], length: int) -> None:
    chosen = {"lm_head": ids, "embed_tokens": ids}
    model = adapted(
        family, torch.float64, trainable_token_indices=chosen, target_modules=["q_proj"]
    )
    text = torch.randint(0, 99, (1, length), generator=torch.Generator().manual_seed(2))
    text[0, 0] = ids[0]
    rows = [value for name, value in model.named_parameters() if "tokens_delta" in name]
    assert len(rows) == (1 if model.config.tie_word_embeddings else 2)
    logits = model(input_ids=text).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(-1, text[:, 1:, None]).squeeze(-1)
    got = model(input_ids=text, head_fn=logprobs_fn(text)).head
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    mine, own = (torch.autograd.grad(x.sum(), rows) for x in (got, expected))
    torch.testing.assert_close(mine, own, rtol=0, atol=1e-12)
    assert all(float(gradient.abs().max()) > 1e-6 for gradient in own)  # far above the tolerance


def test_a_head_is_not_copied_for_its_tokens() -> None:
    """Nor has it a gradient, as big as it is."""
    model = adapted("qwen2", target_modules=["q_proj"], trainable_token_indices=[5, 98])
    head = head_in_use(model.get_base_model())
    assert head.weight is model.get_base_model().lm_head.token_adapter.base_layer.weight
    assert not head.weight.requires_grad and head.lora is not None and head.lora.rank == 2


@pytest.mark.filterwarnings("ignore")  # peft's, on merging
def test_merged_tokens() -> None:
    model = adapted("llama", target_modules=["q_proj"], trainable_token_indices={"lm_head": [7, 4]})
    model.merge_adapter()
    assert head_in_use(model.get_base_model()).lora is None
    assert_head_equals_own_logits(model)


@pytest.mark.filterwarnings("ignore")  # peft's, on merging
@pytest.mark.parametrize(
    "settings", [{"target_modules": ["lm_head"]}, {"trainable_token_indices": {"lm_head": [7, 4]}}]
)
def test_a_merged_adapter_that_is_disabled(settings: dict[str, Any]) -> None:
    """PEFT takes it out of the weight in the forward of the head, which a fused head has not."""
    model = adapted("llama", **({"target_modules": ["q_proj"]} | settings))
    base = model.get_base_model()
    before = head_in_use(base).weight.clone()
    model.merge_adapter()
    assert not head_in_use(base).weight.equal(before)
    with model.disable_adapter():
        head = head_in_use(base)
    assert head.lora is None
    torch.testing.assert_close(head.weight, before)


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
        ("Lora", dict(target_modules=["q_proj"], trainable_token_indices={"lm_head": [3, 3]}),
         "expected each id once, got"),
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


def test_peft_leaves_out_the_bias_of_a_head_with_trained_tokens() -> None:
    model = adapted("phi", target_modules=["q_proj"], trainable_token_indices={"lm_head": [3]})
    with pytest.raises(ValueError, match="expected no bias"):
        head_in_use(model.get_base_model())
