"""OpenRLHF's actor gives the same log-probabilities, entropies and gradients with our kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.integrations.hosts import need

need("openrlhf")

from grpo_kernels.integrations import lazy_scorers
from tests.integrations.contract import Adapter, contract_of, unformed
from tests.support.tiny_models import rounded_model

# what it imports for GPUs and does not call here
ABSENT = {
    "deepspeed": (),
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
}
B, L, ANSWER = 3, 7, 4


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in ABSENT.items():
            module = ModuleType(name)
            module.__spec__, module.__path__ = ModuleSpec(name, None), []
            vars(module).update(dict.fromkeys(attributes))
            patch.setitem(sys.modules, name, module)
        yield


def step(
    with_ours: bool, temperature: float = 1.0, dtype: Any = torch.float32, lazy: bool = True
) -> Any:
    model = rounded_model("qwen2", dtype)
    actor = importlib.import_module("openrlhf.models.actor").Actor(model, temperature=temperature)
    actor.packing_samples = False  # it says so itself only of a model that it has loaded
    if not lazy:  # its scorers are ours, its logits are real
        on: Any = lazy_scorers.SWITCHES["openrlhf"].enabled()
        with on if with_ours else nullcontext():
            return score(actor)
    with lazy_scorers.enabled(model, "openrlhf") if with_ours else nullcontext(), unformed():
        return score(actor)


def score(actor: Any) -> tuple[Any, ...]:
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


test_contract = contract_of(
    Adapter(
        package="openrlhf",
        step=step,
        settings={"plain": {}, "temperature": {"temperature": 0.7}, "real logits": {"lazy": False}},
        default={"dtype": torch.bfloat16},
        switch=lazy_scorers.SWITCHES["openrlhf"],
    )
)
