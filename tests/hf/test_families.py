"""The fused head inside a transformers model equals the model's own logits, whatever the family;
a copy of the model computes with its own weights, and trains them."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
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
from grpo_kernels.integrations import trl_head as trl
from tests.parity.accelerate_state import accelerate_state
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


def unwrapped(model: PreTrainedModel) -> Any:
    """Return a copy that accelerate has put mixed precision around, and taken it off."""
    with accelerate_state({}):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        prepared = accelerator.prepare_model(copy.deepcopy(model))
        return accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)


def with_own_head(model: PreTrainedModel) -> Any:
    """Return a shallow copy, which shares its modules up to the head."""
    copied = copy.copy(model)
    copied._modules = {name: copy.deepcopy(child) for name, child in model._modules.items()}
    return copied


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": with_own_head,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "unwrap_model": unwrapped,
    "a copy's copy": lambda model: pickle.loads(pickle.dumps(copy.deepcopy(model))),
}


def by_head_fn(model: PreTrainedModel) -> Tensor:
    ids, mask = tokens()
    return model(input_ids=ids, attention_mask=mask, head_fn=logprobs_fn(ids)).head


def by_labels(model: PreTrainedModel) -> Tensor:
    pytest.importorskip("trl")
    ids, mask = tokens()
    return model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True).log_probs


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize(
    "add,run", [(add_fused_head, by_head_fn), (trl.add_fused_lm_head, by_labels)]
)
def test_a_copy_is_a_model_of_its_own(
    copied: str, add: Callable[[Any], None], run: Callable[[Any], Tensor]
) -> None:
    model = tiny_model("llama")
    name, signature = type(model).__name__, inspect.signature(model.forward)
    add(model)
    before = run(model).detach()
    other = COPIES[copied](model)
    for each in (model, other):
        assert type(each).__name__ == name and inspect.signature(each.forward) == signature
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = run(other)
    torch.testing.assert_close(found, before)
    found.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert other.lm_head.weight.grad.any()
