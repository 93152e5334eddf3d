"""Scorers of hosts, on a host that is made up here; real ones have files of their own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from weakref import WeakSet

import pytest
import torch

from grpo_kernels.integrations import lazy_hosts, lazy_logits
from grpo_kernels.integrations.lazy_logits import LazyLogits
from grpo_kernels.integrations.switch import Host, Switch
from tests.support.tiny_models import tiny_model


def of_theirs(logits: Any, index: Any) -> Any:
    assert not isinstance(logits, LazyLogits) or index.dim() == logits.dim()
    return logits.log_softmax(-1).gather(-1, index.view(*logits.shape[:-1], -1)).view(index.shape)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Have torch as the host, which is installed, with a scorer of TRL's interface."""
    made, user = ModuleType("made_up_host"), ModuleType("made_up_user")
    made.score = user.score = of_theirs  # type: ignore[attr-defined]
    for module in (made, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    scorer = lazy_hosts._Scorer(made.__name__, "score", lazy_hosts._selective_log_softmax)
    switch = Switch(
        Host("torch", (torch.__version__,)), functools.partial(lazy_hosts._replacements, (scorer,))
    )
    monkeypatch.setitem(lazy_hosts.SWITCHES, "made_up", switch)
    monkeypatch.setitem(lazy_hosts._MODELS, "made_up", WeakSet())
    yield user
    assert made.score is user.score is of_theirs  # type: ignore[attr-defined]


def ids_of(model: Any) -> Any:
    return torch.arange(3, 3 + 12).view(2, 6) % model.config.vocab_size


def test_both_kinds_of_logits(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2")
    ids = ids_of(model)
    real = model(ids).logits
    several = torch.stack([ids, ids.flip(1)], dim=-1)
    expected = host.score(real, ids), host.score(real, several)
    with lazy_hosts.enabled(model, "made_up"):
        assert torch.equal(host.score(real, ids), expected[0])
        with monkeypatch.context() as patch:
            patch.setattr(lazy_logits.Recipe, "logits", None)  # nobody forms them
            torch.testing.assert_close(host.score(model(ids).logits, ids), expected[0])
            one = host.score(model(ids).logits, ids[..., None])
        torch.testing.assert_close(one.squeeze(-1), expected[0])
        with pytest.warns(UserWarning, match="LazyLogits: gather needs the"):
            torch.testing.assert_close(host.score(model(ids).logits, several), expected[1])


def test_logits_that_were_formed_and_changed(host: Any) -> None:
    model = tiny_model("qwen2")
    ids = ids_of(model)
    with lazy_hosts.enabled(model, "made_up"), torch.no_grad():
        logits = model(ids).logits
        logits.argmax(-1)
        logits.div_(0.5)
        found = host.score(logits, ids)
    torch.testing.assert_close(found, host.score(model(ids).logits / 0.5, ids).detach())


def test_the_last_model_puts_the_scorers_back(host: Any) -> None:
    models = tiny_model("qwen2"), tiny_model("qwen2")
    for model in (*models, models[0]):
        lazy_hosts.enable(model, "made_up")
    with lazy_hosts.enabled(models[0], "made_up"):
        pass
    lazy_hosts.disable(models[0])
    assert lazy_hosts.SWITCHES["made_up"].on and not lazy_logits.is_enabled(models[0])
    assert lazy_logits.is_enabled(models[1])
    lazy_hosts.disable(models[1])
    lazy_hosts.disable(models[1])
    assert not lazy_hosts.SWITCHES["made_up"].on and not lazy_logits.is_enabled(models[1])


def test_what_is_wrong_is_named(host: Any) -> None:
    model = tiny_model("qwen2")
    with pytest.raises(ValueError, match="host: expected one of trl, openrlhf, skyrl.*; got 'x'"):
        lazy_hosts.enable(model, "x")
    with pytest.raises(ValueError, match="model: expected one with output embeddings, got"):
        lazy_hosts.enable(model.model, "made_up")
    assert not lazy_hosts.SWITCHES["made_up"].on
    lazy_hosts.SWITCHES["made_up"].host = Host("torch", ("0.0",))
    with pytest.raises(ImportError, match="expected version 0.0"):
        lazy_hosts.enable(model, "made_up")
    assert not lazy_logits.is_enabled(model)
