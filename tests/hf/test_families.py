"""The fused head inside a transformers model equals the model's own logits, whatever the family."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grpo_kernels import FusedHead, linear_logprobs
from grpo_kernels.fused_head import HeadFn
from grpo_kernels.head import Head
from grpo_kernels.hf import (
    add_fused_head,
    check_fused_head,
    drop_wrappers,
    logit_scale,
    softcap,
)
from tests.support.tiny_models import FAMILIES, SMALL, tiny_model, tokens

REFUSED = ("modernbert-decoder", "roberta")  # more than a linear layer on the last hidden states


def logprobs_fn(ids: Tensor) -> HeadFn:
    """Return log-probabilities of ``ids[:, 1:]``."""

    def logprobs(hidden: Tensor, head: Head) -> Tensor:
        out = linear_logprobs(hidden[:, :-1], head, ids[:, 1:])
        assert out.logprobs is not None
        return out.logprobs

    return logprobs


def head_in_use(model: PreTrainedModel) -> Head:
    ids, _ = tokens()
    return model(input_ids=ids, head_fn=lambda hidden, head: head).head


def own_logprobs(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def assert_head_equals_own_logits(model: PreTrainedModel) -> None:
    """Compare log-probabilities, and the gradients of all that is trained."""
    ids, mask = tokens()
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    expected = own_logprobs(model, ids, mask)[:, 2:]  # padded positions may be anything
    got = model(input_ids=ids, attention_mask=mask, head_fn=logprobs_fn(ids)).head[:, 2:]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    if not expected.requires_grad:
        return
    mine, own = (
        torch.autograd.grad(x.sin().sum(), list(trained.values()), materialize_grads=True)
        for x in (got, expected)
    )
    largest = max(float(x.abs().max()) for x in own)
    for name, x, y in zip(trained, mine, own, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_head_equals_the_models_own_logits(family: str) -> None:
    model = tiny_model(family)
    add_fused_head(model)
    assert_head_equals_own_logits(model)
    check_fused_head(model)


@pytest.mark.parametrize("family", REFUSED)
def test_a_head_that_is_not_understood_is_refused(family: str) -> None:
    model = tiny_model(family)
    add_fused_head(model)
    with pytest.raises(ValueError, match="its head is not supported"):
        check_fused_head(model)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("cohere", "logit_scale", 0.26),
        ("granite", "logits_scaling", 1.0),
        ("gemma2", "final_logit_softcapping", None),
        ("qwen2", "final_logit_softcapping", 50.0),
    ],
)
def test_check_sees_what_the_logits_do_not_do(family: str, field: str, value: object) -> None:
    """The weights are small, so that own logits hardly tell a softcap."""
    model = tiny_model(family)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-3)
    add_fused_head(model)
    check_fused_head(model.bfloat16())
    model.float()
    said = copy.deepcopy(model.config)
    setattr(said, field, value)

    FusedHead(model.get_output_embeddings(), logit_scale=logit_scale(said), softcap=softcap(said))
    with pytest.raises(ValueError, match="relative error"):
        check_fused_head(model)


def test_padding_may_be_the_end_of_text() -> None:
    """The embedding of the padding token is zero, and so are logits made of it alone."""
    config = {**SMALL, "bos_token_id": None, "eos_token_id": 0}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3"](**config))
    add_fused_head(model)
    check_fused_head(model)


def test_check_leaves_no_trace() -> None:
    model = tiny_model("qwen2").train()
    add_fused_head(model)
    state = torch.get_rng_state()
    check_fused_head(model)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert not model.model._forward_hooks


def test_without_head_fn_nothing_changes() -> None:
    model = tiny_model("qwen2")
    ids, mask = tokens()
    before = model(input_ids=ids, attention_mask=mask).logits
    add_fused_head(model)
    add_fused_head(model)  # twice is harmless
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert out.shape[0] == 2


def test_forwards_set_before_and_since() -> None:
    model, called = tiny_model("qwen2"), []
    ids, mask = tokens()

    def patched(self: PreTrainedModel, **kwargs: object) -> None:
        called.append(self)

    model.forward = MethodType(patched, model)
    drop_wrappers(model)  # as it is: not ours
    add_fused_head(model)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each(input_ids=ids, attention_mask=mask)
        each.forward = MethodType(patched, each)
        drop_wrappers(each)
        assert "forward" not in vars(each)
    assert called[0] is model and called[1] is copied


def test_what_is_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="model: expected a"):
        add_fused_head(model.model)
    add_fused_head(model)
    ids, _ = tokens()
    with pytest.raises(ValueError, match="labels: expected None"):
        model(input_ids=ids, labels=ids, head_fn=lambda hidden, head: hidden)
    packed = torch.zeros(99 * 16, 1, dtype=torch.uint8)
    model.lm_head.weight = torch.nn.Parameter(packed, requires_grad=False)
    with pytest.raises(ValueError, match="leave it out of the quantization"):
        head_in_use(model)
