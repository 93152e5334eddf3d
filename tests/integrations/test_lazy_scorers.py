"""Scorers of hosts take logits that are not formed: TRL's, of a version that is not tested."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from grpo_kernels.fused_head import FusedHead
from grpo_kernels.integrations import lazy_scorers
from tests.integrations.contract import Adapter, contract_of, unformed
from tests.support.tiny_models import tiny_model

utils = pytest.importorskip("trl.trainer.utils")
IDS = torch.arange(3, 3 + 12).view(2, 6)
SWITCH = lazy_scorers.SWITCHES["trl"]


def on(model: Any) -> Any:
    return lazy_scorers.enabled(model, "trl", any_version=True)


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
    lazy_scorers.enable(tiny_model("qwen2").model, "trl", any_version=True)


def test_arguments_of_another_version_are_theirs() -> None:
    model = tiny_model("qwen2")
    expected = utils.selective_log_softmax(model(IDS).logits, IDS, temperature=0.5)
    with on(model):
        found = utils.selective_log_softmax(model(IDS).logits, IDS, temperature=0.5)
    torch.testing.assert_close(found, expected)


def enable_untold() -> None:
    lazy_scorers.enable(tiny_model("qwen2"), "trl")


test_contract = contract_of(
    Adapter(
        package="trl",
        step=step,
        settings={"": {}, "real": {"real": True}},
        refused={
            r"trl.trainer.utils.selective_log_softmax: new parameter 'row_mask": enable_untold,
            "host: expected one of trl, openrlhf, skyrl": lambda: lazy_scorers.enable(None, "x"),
            "model: expected output embeddings, got none in": enable_part,
        },
    )
)


def test_several_ids_of_a_token_and_logits_that_were_formed() -> None:
    model = tiny_model("qwen2")
    several = torch.stack([IDS, IDS.flip(1)], dim=-1)
    expected = utils.selective_log_softmax(model(IDS).logits, several)
    with on(model), torch.no_grad():
        logits = model(IDS).logits
        found = utils.selective_log_softmax(logits, several)
        torch.testing.assert_close(found, expected.detach())
        assert torch.equal(logits.form_logits(), model(IDS).logits.form_logits())
        logits.div_(0.5)
        found = utils.selective_log_softmax(logits, IDS)
    expected = utils.selective_log_softmax(model(IDS).logits / 0.5, IDS)
    torch.testing.assert_close(found, expected.detach())


def test_the_last_model_puts_the_scorers_back() -> None:
    models = tiny_model("qwen2"), tiny_model("qwen2")
    for model in (*models, models[0]):
        lazy_scorers.enable(model, "trl", any_version=True)
    with on(models[0]):
        pass
    lazy_scorers.disable(models[0])
    assert SWITCH.on and not lazy_scorers.are_deferred(models[0])
    assert lazy_scorers.are_deferred(models[1])
    lazy_scorers.disable(models[1])
    lazy_scorers.disable(models[1])
    assert not SWITCH.on and not lazy_scorers.are_deferred(models[1])


LAZY = {
    "rows": lambda x: x[:, 1:-1],
    "a row": lambda x: x[0],
    "all ids": lambda x: x[:, -3:, :],
    "an empty dimension": lambda x: x[:1].squeeze(0),
    "a temperature": lambda x: (x / 0.7)[:, 1:],
    "a scale": lambda x: x.float() * 2,
    "in place": lambda x: x[:, 1:].div_(0.5),
}
FORMED = {
    "some ids": lambda x: x[:, :, :9],
    "a learned scale": lambda x: x * torch.tensor(2.0),
    "a learned temperature": lambda x: x / torch.tensor(2.0),
    "a function": lambda x: torch.tanh(x),
    "a cast": lambda x: x.to(torch.float64),
}


def gradient_of(model: Any, x: Any) -> Any:
    weight = model.lm_head.weight
    return torch.autograd.grad(x, weight)[0] if x.requires_grad else x


@pytest.mark.parametrize("name", LAZY)
def test_what_stays_unformed(name: str) -> None:
    model = tiny_model("qwen2")
    real = LAZY[name](model(IDS).logits)
    ids = IDS.flatten()[: real[..., 0].numel()].view(real.shape[:-1])
    with on(model), unformed():
        lazy = LAZY[name](model(IDS).logits)
        assert lazy.shape == real.shape and len(lazy) == len(real)
        found = lazy.logprobs(ids), lazy.entropy()
    expected = utils.selective_log_softmax(real, ids), utils.entropy_from_logits(real)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    a, b = (gradient_of(model, sum(x.sum() for x in each)) for each in (found, expected))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMED)
def test_what_is_formed(name: str) -> None:
    model = tiny_model("qwen2")
    expected = FORMED[name](model(IDS).logits)
    with on(model):
        found = FORMED[name](model(IDS).logits)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient_of(model, found.sum()), gradient_of(model, expected.sum()))


def test_what_is_of_no_use_any_more() -> None:
    model = tiny_model("qwen2")
    with on(model):
        logits = model(IDS).logits
        LAZY["in place"](logits)
        with pytest.raises(RuntimeError, match="LazyLogits: expected .* not modified in place"):
            logits.logprobs(IDS)
        logits = model(IDS).logits
        with pytest.raises(AttributeError, match=r"no attribute 'clamp'; call form_logits\(\)"):
            logits.clamp(max=1.0)
        with pytest.raises(ValueError, match="div_: expected a number > 0"):
            logits.div_(torch.tensor(0.5))
    with pytest.raises(RuntimeError, match=r"expected an enabled head, got one after disable\(\)"):
        logits[:].form_logits()


def test_generation_is_as_before() -> None:
    model = tiny_model("qwen2").eval()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS, **options)
    with on(model):
        assert torch.equal(model.generate(IDS, **options), expected)


def test_on_and_off() -> None:
    model = tiny_model("qwen2")
    before, attributes = model(IDS).logits, vars(model.lm_head).keys() | set()
    with on(model):
        copied = copy.deepcopy(model)
    assert torch.equal(model(IDS).logits, before)
    assert type(model.lm_head) is torch.nn.Linear and vars(model.lm_head).keys() == attributes
    assert copied(IDS).logits.layer is copied.lm_head
    fused = FusedHead(model.lm_head, softcap=2.0)
    with on(model):
        pass
    assert type(model.lm_head) is type(fused) and fused._transform.softcap == 2.0


def test_lora_on_the_head() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("qwen2"), config)
    expected = utils.selective_log_softmax(model(input_ids=IDS).logits, IDS)
    with on(model.get_base_model()), unformed():
        found = utils.selective_log_softmax(model(input_ids=IDS).logits, IDS)
    torch.testing.assert_close(found, expected)
