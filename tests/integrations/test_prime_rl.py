"""prime-rl's heads with our kernels, and our losses as its own, against full logits and fp64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, TokenBatch, policy_loss
from tests.integrations import contract
from tests.integrations.contract import Adapter
from tests.integrations.host_stand_ins import PRIME_RL, copied, statistics

prime_rl = copied("grpo_prime_rl")
B, S, D, V = 2, 7, 16, 61
HEADS = {"lm_head": "FusedOutputLinear", "lm_head_gemma": "GemmaFusedOutputLinear"}
SOFTCAP = 1.5
SUMMED = ("dapo", "cispo", "vespo", "pg", "ipo", "cppo")
_SETTINGS: dict[str, dict[str, Any]] = {"cispo": {"epsilon_high": 5.0}}

Host = dict[str, ModuleType]


@pytest.fixture(params=PRIME_RL.kinds)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    with PRIME_RL.present(request.param) as modules:
        yield modules


def make_head(host: Host, module: str, dtype: torch.dtype) -> Any:
    options = {"softcap": SOFTCAP} if module == "lm_head_gemma" else {}
    generator = torch.Generator().manual_seed(1)
    head = getattr(host[module], HEADS[module])(D, V, chunk_size=5, **options)
    weight = (torch.randn(V, D, generator=generator) * 0.4).bfloat16()
    head.weight = torch.nn.Parameter(weight.to(dtype))
    return head


def make_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(B, S, D, generator=generator).bfloat16().to(dtype).requires_grad_()
    labels = torch.randint(0, V, (B, S), generator=generator)
    return hidden, labels, 0.5 + torch.rand(B, S, generator=generator)


def step(with_ours: bool, module: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Return the outputs, and the gradients through the log-probabilities."""
    modules = {name: import_module(f"prime_rl.trainer.models.layers.{name}") for name in HEADS}
    head, (hidden, labels, temperature) = make_head(modules, module, dtype), make_inputs(dtype)
    with prime_rl.enabled() if with_ours else nullcontext():
        out = head(hidden, labels, temperature=temperature)
    outer = torch.randn(B, S, generator=torch.Generator().manual_seed(3))
    gradients = torch.autograd.grad((out["logprobs"] * outer).sum(), [hidden, head.weight])
    assert out["logprobs"].dtype == torch.float32
    return out["logprobs"].detach(), out["entropy"].detach(), *gradients


def call_head(*inputs: Any) -> None:
    module = import_module("prime_rl.trainer.models.layers.lm_head")
    with prime_rl.enabled():
        make_head({"lm_head": module}, "lm_head", torch.float32)(*inputs)


def call_loss(**settings: Any) -> None:
    host = {"loss": import_module("prime_rl.trainer.rl.loss")}
    prime_rl.dapo(make_sample(host, ref_logprobs=None), **settings)


ADAPTER = Adapter(
    package="prime_rl",
    step=step,
    settings={name: {"module": name} for name in HEADS},
    default={"dtype": torch.bfloat16},
    switch=prime_rl.SWITCH,
    refused={
        r"labels: expected a tensor of shape \(b, s\), got N": partial(call_head, torch.ones(1, D)),
        "temperature: expected a tensor": partial(call_head, *make_inputs(torch.float32)[:2]),
        "temperature: expected none here .the host's log-prob": partial(call_loss, temperature=0.7),
        "entropy_coef: expected none here": partial(call_loss, entropy_coef=0.1),
        "rollout_correction_mode: expected none here": partial(
            call_loss, rollout_correction_mode="token_mask"
        ),
        "epsilonn: expected a setting of dapo": partial(call_loss, epsilonn=0.1),
        "ref_logprobs: expected the reference's": partial(call_loss, beta=0.1),
        "loss_type: expected one of": partial(prime_rl.loss_fn, "grpo"),
        "has no attribute 'ppo'": lambda: prime_rl.ppo,
    },
)
CONTRACT = contract.cases(ADAPTER)


@pytest.mark.parametrize("case", CONTRACT)
def test_contract(host: Host, case: str) -> None:
    CONTRACT[case]()


def test_bias_and_a_gradient_of_the_entropy(host: Host) -> None:
    """Both are beyond their heads."""
    head = make_head(host, "lm_head", torch.float32)
    head.bias = torch.nn.Parameter(torch.randn(V))
    hidden, labels, temperature = make_inputs(torch.float32)
    with prime_rl.enabled():
        out = head(hidden, labels, temperature)
    inputs = [hidden, head.weight, head.bias]
    scores = (hidden @ head.weight.t() + head.bias) / temperature[..., None]
    logprobs, entropy = statistics(scores, labels)
    torch.testing.assert_close(out["logprobs"], logprobs)
    found = torch.autograd.grad(out["entropy"].square().sum(), inputs)
    torch.testing.assert_close(found, torch.autograd.grad(entropy.square().sum(), inputs))


def make_sample(host: Host, number: int = 0, **more: Any) -> Any:
    """Return the inputs of a loss: the tokens of one sample; of number 1 none counts."""
    g = torch.Generator().manual_seed(number)
    length = (5, 1, 9)[number]
    own, old, ref, advantages = (torch.randn(length, generator=g) for _ in range(4))
    mask = (torch.rand(length, generator=g) < 0.7) & torch.tensor(number != 1)
    mask[:3] |= number != 1
    given = {
        "trainer_logprobs": (own * 0.3 - 2).requires_grad_(),
        "inference_logprobs": own * 0.3 - 2 + 0.3 * old,
        "ref_logprobs": own * 0.3 - 2 + 0.3 * ref,
        "advantages": advantages,
        "loss_mask": mask,
        "loss_weights": None,
    }
    return host["loss"].LossInputs(**given | more)


def with_gradient(loss: Tensor, inputs: Any) -> tuple[Tensor, Tensor]:
    leaf = inputs.trainer_logprobs
    return loss.detach(), torch.autograd.grad(loss, leaf, materialize_grads=True)[0]


def own_loss(inputs: Any, loss_type: str, **settings: Any) -> Tensor:
    """Return what we have for a batch of one sample, as a sum."""
    batch = TokenBatch.from_padded(
        torch.zeros_like(inputs.loss_mask, dtype=torch.int64)[None], inputs.advantages[None],
        inputs.loss_mask[None], old_logprobs=inputs.inference_logprobs[None],
        ref_logprobs=inputs.ref_logprobs[None], num_items_in_batch=torch.tensor(1.0),
    )  # fmt: skip
    config = LossConfig(
        loss_type=loss_type, rollout_correction_mode=None, bypass_mode=False, **settings
    )
    return policy_loss(inputs.trainer_logprobs[inputs.loss_mask], batch, config)[0]


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("loss_type", SUMMED)
def test_losses(host: Host, loss_type: str, number: int) -> None:
    settings = {"beta": 0.1, **_SETTINGS.get(loss_type, {})}
    if loss_type == "dapo":
        settings |= {"importance_sampling_level": "sequence", "epsilon": 0.01}
    inputs, fn = make_sample(host, number), getattr(prime_rl, loss_type)  # as it is imported
    outputs = fn(inputs, **settings)
    found = with_gradient(outputs.loss, inputs)
    expected = with_gradient(own_loss(inputs, loss_type, **settings), inputs)
    torch.testing.assert_close(found, expected)
    assert all(value.isfinite() for value in outputs.metrics.values())
    assert bool(outputs.metrics) == ("kl" in outputs.metrics) == (number != 1)


@pytest.mark.parametrize("host", PRIME_RL.kinds[1:], indirect=True)
def test_which_of_ours_are_theirs(host: Host) -> None:
    """Their default is DPPO with a penalty, ``ipo`` another; only the values have another form."""
    bounds = {"dppo_mask_low": 0.01, "dppo_mask_high": 0.01, "ipo_threshold": 0.01}
    config = SimpleNamespace(adv_tau=1.0, kl_tau=1e-3, **bounds)
    dppo = {"dppo_tv_low": 0.01, "dppo_tv_high": 0.01, "dppo_tau": 1e-3, "dppo_ratio_max": 1e9}
    for name, ours, settings in (
        ("default_loss_fn", prime_rl.dppo_tv, dppo),
        ("ipo_loss_fn", prime_rl.ipo, {"ipo_threshold": 0.01}),
    ):
        inputs = make_sample(host, 2)
        theirs = getattr(host["loss"], name)(inputs, config)
        assert 0 < theirs.metrics["is_masked"] < 1
        found = (with_gradient(x.loss, inputs)[1] for x in (ours(inputs, **settings), theirs))
        torch.testing.assert_close(*found)


def test_weights_of_tokens(host: Host) -> None:
    """Weight the losses that each token has alone."""
    settings, fn, weights = {"beta": 0.1}, prime_rl.dapo, torch.linspace(0.5, 2, 9)
    inputs = make_sample(host, 2, loss_weights=weights)
    total = torch.zeros(())
    for token in inputs.loss_mask.nonzero():
        alone = dataclasses.replace(inputs, loss_mask=torch.arange(9) == token, loss_weights=None)
        total = total + weights[token] * fn(alone, **settings).loss
    found = with_gradient(fn(inputs, **settings).loss, inputs)
    torch.testing.assert_close(found, with_gradient(total.squeeze(), inputs))


def test_their_sum_over_samples(host: Host) -> None:
    samples = [make_sample(host, number) for number in range(3)]
    names = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask")
    given = {name: [getattr(sample, name) for sample in samples] for name in names}
    none = dict.fromkeys(("rl_weights", "ce_weights", "ref_kl_weights"))
    scales = {"rl_scale": 11, "ce_scale": 1, "ref_kl_scale": 1}
    found, metrics = host["loss"].compute_loss(**given, **none, **scales, rl_loss_fn=prime_rl.dapo)
    expected = sum(prime_rl.dapo(sample).loss for sample in samples) / 11
    torch.testing.assert_close(found, expected)
    # two of the samples have tokens
    assert {"ratio/max", "perplexity"} <= set(metrics)
    assert all(x.shape == (2,) for x in metrics.values())
