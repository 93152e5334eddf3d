"""SkyRL's scorers give the same with logits that are not formed.

Its packages import what there is for GPUs alone, so the module of its scorers is imported by
itself, and called as its ``HFModelWrapper`` calls it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.integrations.hosts import need
from tests.integrations.precision import assert_results_as_exact_as

need("skyrl_fsdp")

from grpo_kernels.integrations import lazy_hosts, lazy_logits
from tests.hf.test_families import tiny_model

MODULE = "skyrl.backends.skyrl_train.utils.torch_utils"
B, L = 3, 7


@pytest.fixture(autouse=True)
def _without_its_packages() -> Iterator[None]:
    parts = MODULE.split(".")[:-1]
    with pytest.MonkeyPatch.context() as patch:
        for depth in range(1, len(parts) + 1):
            package = ModuleType(".".join(parts[:depth]))
            package.__path__ = [str(distribution("skyrl").locate_file("/".join(parts[:depth])))]
            patch.setitem(sys.modules, package.__name__, package)
        yield


def score(model: Any, temperature: float, requires_grad: bool) -> tuple[Any, ...]:
    scorers = sys.modules[MODULE]
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (B, L), generator=g)
    mask = torch.ones(B, L, dtype=torch.int64)
    mask[0, 5:] = 0
    logits = model(ids, attention_mask=mask)["logits"]
    logits.div_(temperature)
    logp = scorers.logprobs_from_logits(logits, ids.roll(-1, 1), inplace_backward=True)
    entropy = scorers.chunked_entropy_from_logits(
        logits, requires_grad=requires_grad, attention_mask=mask, chunk_size=4
    )
    assert entropy.requires_grad == requires_grad
    weights = torch.linspace(-1, 1, logp.numel()).view(logp.shape) + 0.1
    loss = (logp * weights).sum() + 0.3 * entropy.sum()
    return logp.detach(), entropy.detach(), torch.autograd.grad(loss, [*model.parameters()])


@pytest.mark.parametrize("requires_grad", [False, True])
def test_parity(requires_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2")
    __import__(MODULE)
    expected = score(model, 0.7, requires_grad)
    with monkeypatch.context() as patch, lazy_hosts.enabled(model, "skyrl"):
        patch.setattr(lazy_logits.Recipe, "logits", None)  # nobody forms them
        found = score(model, 0.7, requires_grad)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)
    again = score(model, 0.7, requires_grad)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_its_default_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2").to(torch.bfloat16)
    __import__(MODULE)
    theirs = score(model, 0.7, True)
    exact = score(copy.deepcopy(model).float(), 0.7, True)
    monkeypatch.setattr(lazy_logits.Recipe, "logits", None)  # nobody forms them
    with lazy_hosts.enabled(model, "skyrl"):
        assert_results_as_exact_as(score(model, 0.7, True), theirs, exact)


def test_a_scorer_that_was_bound_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own entropy forms a chunk at a time, and is right."""
    model = tiny_model("qwen2")
    __import__(MODULE)
    theirs = sys.modules[MODULE].chunked_entropy_from_logits
    ids = torch.arange(3, 3 + B * L).view(B, L)
    expected = theirs(model(ids).logits, chunk_size=4)
    form, formed = lazy_logits.Recipe.logits, []

    def recorded(self: Any) -> torch.Tensor:
        formed.append(self.hidden.shape[1])
        return form(self)

    monkeypatch.setattr(lazy_logits.Recipe, "logits", recorded)
    with lazy_hosts.enabled(model, "skyrl"):
        found = theirs(model(ids).logits, chunk_size=4)
    torch.testing.assert_close(found, expected)
    assert max(formed) <= 4
