"""A copy of a model with a fused head computes with its own weights, and trains them."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from grpo_kernels.hf import add_fused_head
from grpo_kernels.integrations import trl_head as trl
from tests.hf.test_families import logprobs_fn
from tests.parity.accelerate_state import accelerate_state
from tests.support.tiny_models import tiny_model, tokens


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
