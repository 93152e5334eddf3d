"""OpenRLHF's actor gives the same log-probabilities, entropies and gradients with our kernels."""

from __future__ import annotations

import copy
import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.hosts import need

need("openrlhf")

from grpo_kernels.integrations import lazy_hosts, lazy_logits
from tests.hf.test_families import tiny_model

# what it imports for GPUs and does not call here
ABSENT = {
    "deepspeed": (),
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
}
B, L, ANSWER = 3, 7, 4


@pytest.fixture(scope="module")
def actor_class() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in ABSENT.items():
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            module.__path__ = []
            vars(module).update(dict.fromkeys(attributes))
            patch.setitem(sys.modules, name, module)
        yield importlib.import_module("openrlhf.models.actor").Actor


@pytest.fixture(autouse=True)
def _no_compiler() -> Any:
    with torch.compiler.set_stance("force_eager"):  # its entropy is compiled
        yield


def make(actor_class: Any, model: Any, temperature: float = 1.0) -> Any:
    actor = actor_class(model, temperature=temperature)
    actor.packing_samples = False  # it says so itself only of a model that it has loaded
    return actor


def run(actor: Any) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (B, L), generator=g)
    attention = torch.ones(B, L, dtype=torch.int64)
    attention[0, :2] = 0
    answers = torch.ones(B, ANSWER, dtype=torch.int64)
    answers[1, 2:] = 0
    actor.train()
    logp, output = actor(ids, answers, attention, return_output=True, return_entropy=True)
    with torch.no_grad():
        old = actor(ids, answers, attention)
    weights = torch.linspace(-1, 1, logp.numel()).view(logp.shape) + 0.1
    loss = (logp * weights).sum()
    if actor.temperature == 1:  # else theirs changes what the entropy's gradient needs
        loss = loss + 0.3 * (output.entropy[:, -ANSWER:] * answers).sum()
    gradients = torch.autograd.grad(loss, list(actor.model.parameters()))
    return logp.detach(), output.entropy.detach(), old, gradients


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_actor(
    actor_class: Any, temperature: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make(actor_class, tiny_model("qwen2").to(dtype), temperature)
    exact = run(make(actor_class, copy.deepcopy(actor.model).float(), temperature))
    theirs = run(actor)
    monkeypatch.setattr(lazy_logits.Recipe, "logits", None)  # nobody forms them
    with lazy_hosts.enabled(actor.model, "openrlhf"):
        found = run(actor)
    assert not lazy_hosts.SWITCHES["openrlhf"].on
    if dtype == torch.float32:
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=2e-6)
    else:
        for mine, other, true in zip(flat(found), flat(theirs), flat(exact), strict=True):
            assert error(mine, true) <= 2 * error(other, true) + 1e-6


def flat(results: tuple[Any, ...]) -> list[Tensor]:
    return [*results[:3], *results[3]]


def error(found: Tensor, true: Tensor) -> float:
    return float((found.float() - true).norm())


def test_real_logits_are_theirs(actor_class: Any) -> None:
    actor = make(actor_class, tiny_model("qwen2"))
    expected = run(actor)
    with lazy_hosts.SWITCHES["openrlhf"].enabled():
        found = run(actor)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
