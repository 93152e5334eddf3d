"""Scorers of hosts take logits that are not formed: TRL's, of a version that is not tested."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from grpo_kernels.integrations import lazy_hosts, lazy_logits
from tests.integrations.contract import Adapter, contract_of, unformed
from tests.support.tiny_models import tiny_model

utils = pytest.importorskip("trl.trainer.utils")
IDS = torch.arange(3, 3 + 12).view(2, 6)
SWITCH = lazy_hosts.SWITCHES["trl"]


def on(model: Any) -> Any:
    return lazy_hosts.enabled(model, "trl", any_version=True)


def step(with_ours: bool, real: bool = False) -> tuple[Any, ...]:
    model = tiny_model("qwen2")
    logits = model(IDS).logits if real else None
    with on(model) if with_ours else nullcontext(), unformed():
        logits = model(IDS).logits if logits is None else logits
        one = utils.selective_log_softmax(logits, IDS[..., None])
        logprobs, entropy = (
            utils.selective_log_softmax(logits, IDS), utils.entropy_from_logits(logits),
        )  # fmt: skip
        loss = (logprobs.sin() + 0.1 * entropy + one[..., 0]).mean()
        return logprobs, entropy, one, torch.autograd.grad(loss, list(model.parameters()))


def enable_part() -> None:
    lazy_hosts.enable(tiny_model("qwen2").model, "trl", any_version=True)


test_contract = contract_of(
    Adapter(
        package="trl",
        step=step,
        settings={"": {}, "real": {"real": True}},
        switch=SWITCH,
        refused={
            "host: expected one of trl, openrlhf, skyrl": lambda: lazy_hosts.enable(None, "x"),
            "model: expected one with output embeddings, got": enable_part,
        },
    )
)


@pytest.mark.filterwarnings("ignore:LazyLogits")
def test_several_ids_of_a_token_and_logits_that_were_formed() -> None:
    model = tiny_model("qwen2")
    several = torch.stack([IDS, IDS.flip(1)], dim=-1)
    expected = utils.selective_log_softmax(model(IDS).logits, several)
    with on(model), torch.no_grad():
        logits = model(IDS).logits
        found = utils.selective_log_softmax(logits, several)
        torch.testing.assert_close(found, expected.detach())
        logits.div_(0.5)
        found = utils.selective_log_softmax(logits, IDS)
    expected = utils.selective_log_softmax(model(IDS).logits / 0.5, IDS)
    torch.testing.assert_close(found, expected.detach())


def test_the_last_model_puts_the_scorers_back() -> None:
    models = tiny_model("qwen2"), tiny_model("qwen2")
    for model in (*models, models[0]):
        lazy_hosts.enable(model, "trl", any_version=True)
    with on(models[0]):
        pass
    lazy_hosts.disable(models[0])
    assert SWITCH.on and not lazy_logits.is_enabled(models[0])
    assert lazy_logits.is_enabled(models[1])
    lazy_hosts.disable(models[1])
    lazy_hosts.disable(models[1])
    assert not SWITCH.on and not lazy_logits.is_enabled(models[1])
