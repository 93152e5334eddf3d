"""Adapters on a transformers model's head, and beside it: the fused head equals the model's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_kernels.head import Head
from grpo_kernels.hf import add_fused_head, check_fused_head, keep_head_in_fp32
from tests.hf.test_families import (
    assert_head_equals_own_logits,
    head_in_use,
    logprobs_fn,
    own_logprobs,
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


@pytest.mark.parametrize("lora", ["layers", "head", "whole head"])
def test_gradients_of_adapters(lora: str) -> None:
    model = adapted("llama", **ADAPTED[lora])
    ids, mask = tokens()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    trained = list(named.values())
    assert len(named) < len(list(model.parameters()))
    expected = torch.autograd.grad(own_logprobs(model, ids, mask)[:, 2:].sum(), trained)
    fused = model(input_ids=ids, attention_mask=mask, head_fn=logprobs_fn(ids)).head
    gradients = torch.autograd.grad(fused[:, 2:].sum(), trained)
    for name, got, want in zip(named, gradients, expected, strict=True):
        scale = float(want.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_small_updates_of_a_bf16_head_are_not_rounded_away(
    factors: torch.dtype, autocast: bool
) -> None:
    model = adapted("llama", target_modules=["lm_head"])
    base = model.get_base_model()
    base.lm_head.base_layer.bfloat16()
    base.lm_head.lora_A.to(factors), base.lm_head.lora_B.to(factors)
    with torch.no_grad():
        base.lm_head.lora_B["default"].weight.mul_(1e-4)
    if not autocast:
        base.model.bfloat16()
    ids, _ = tokens()
    seen: list[Tensor] = []

    def logprobs(hidden: Tensor, head: Head) -> Tensor:
        seen.append(hidden.bfloat16().double())
        assert head.weight is base.lm_head.base_layer.weight  # nothing is merged
        return logprobs_fn(ids)(hidden, head)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = model(input_ids=ids, head_fn=logprobs).head
    weight, a, b = (
        x.weight.double()
        for x in (
            base.lm_head.base_layer,
            base.lm_head.lora_A["default"],
            base.lm_head.lora_B["default"],
        )
    )
    merged = weight + 7 / 3 * b @ a
    assert (merged.bfloat16() == weight.bfloat16()).float().mean() > 0.9
    change = got.double() - _logprobs(seen[0], weight, ids)
    exact = _logprobs(seen[0], merged, ids) - _logprobs(seen[0], weight, ids)
    assert exact.abs().max() > 1e-5
    torch.testing.assert_close(change, exact, rtol=0.05, atol=1e-6)


def _logprobs(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    scores = (hidden[:, :-1] @ weight.T).log_softmax(-1)
    return scores.gather(-1, ids[:, 1:, None]).squeeze(-1)


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
    ("lora", "problem"),
    [
        (dict(lora_dropout=0.1), "lora_dropout=0.1"),
        (dict(use_dora=True), "DoRA"),
        (
            dict(trainable_token_indices={"lm_head": [3]}, target_modules=["q_proj"]),
            "single tokens",
        ),
    ],
)
def test_adapters_of_the_head_that_are_refused(lora: dict[str, object], problem: str) -> None:
    model = adapted("llama", **{"target_modules": ["lm_head"], **lora})
    with pytest.raises(ValueError, match=problem):
        head_in_use(model.get_base_model())


def test_other_methods_on_the_head_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    add_fused_head(model)
    config = peft.LoHaConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="adapter of type"):
        head_in_use(peft.get_peft_model(model, config).get_base_model())
