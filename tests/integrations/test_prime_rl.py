"""prime-rl's heads with our kernels, and our losses as its own, against full logits and fp64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from grpo_kernels.integrations import prime_rl
from grpo_kernels.losses import LOSSES
from tests.integrations import contract
from tests.integrations.contract import Adapter
from tests.integrations.host_stand_ins import PRIME_RL, statistics
from tests.sharded.ranks import run_on_ranks

B, S, D, V = 2, 7, 16, 61
HEADS = {"lm_head": "FusedOutputLinear", "lm_head_gemma": "GemmaFusedOutputLinear"}
SOFTCAP = 1.5
SUMMED = ("dapo", "cispo", "vespo", "pg", "topr")
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


ADAPTER = Adapter(
    package="prime_rl",
    step=step,
    settings={name: {"module": name} for name in HEADS},
    default={"dtype": torch.bfloat16},
    switch=prime_rl.SWITCH,
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


def test_frozen_and_in_place(host: Host) -> None:
    head = make_head(host, "lm_head", torch.float32).requires_grad_(False)
    hidden, labels, temperature = make_inputs(torch.float32)
    with prime_rl.enabled():
        out = head(hidden, labels, temperature)
    out["logprobs"].sum().backward()
    assert hidden.grad is not None and head.weight.grad is None


def test_what_is_missing_is_named(host: Host) -> None:
    head = make_head(host, "lm_head", torch.float32)
    hidden, labels, _ = make_inputs(torch.float32)
    with prime_rl.enabled():
        with pytest.raises(ValueError, match=r"labels: expected a tensor of shape \(b, s\), got N"):
            head(hidden)
        with pytest.raises(ValueError, match="temperature: expected a tensor"):
            head(hidden, labels)


def make_samples(host: Host, weighted: bool) -> dict[str, Any]:
    """Return the arguments of their ``compute_loss`` for three samples, one without loss tokens."""
    generator = torch.Generator().manual_seed(4)
    lengths = (5, 1, 9)

    def each(scale: float = 0.3) -> list[Tensor]:
        return [torch.randn(n, generator=generator) * scale for n in lengths]

    own = [x - 2 for x in each()]
    masks = [torch.rand(n, generator=generator) < 0.7 for n in lengths]
    masks[0][:3], masks[1][:] = True, False
    return {
        "trainer_logprobs": [x.requires_grad_() for x in own],
        "inference_logprobs": [x.detach() + d for x, d in zip(own, each(), strict=True)],
        "ref_logprobs": [x.detach() + d for x, d in zip(own, each(), strict=True)],
        "advantages": each(1.0),
        "loss_mask": masks,
        "rl_weights": [x.abs() + 0.5 for x in each()] if weighted else None,
        "ce_weights": None,
        "ref_kl_weights": None,
        "rl_scale": 11,
        "ce_scale": 1,
        "ref_kl_scale": 1,
    }


def by_hand(loss_type: str, samples: dict[str, Any], beta: float) -> Tensor:
    """Write the losses out as their papers do."""
    total = torch.zeros((), dtype=torch.float64)
    weights = samples["rl_weights"] or [torch.ones_like(x) for x in samples["trainer_logprobs"]]
    names = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask")
    for *values, weight in zip(*(samples[name] for name in names), weights, strict=True):
        mask = values.pop()
        logp, old, ref, advantage, weight = (x[mask].double() for x in (*values, weight))
        ratio = (logp - old).exp()
        each = {
            "dapo": -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage),
            "cispo": -ratio.clamp(max=5.0).detach() * advantage * logp,
            "pg": -advantage * logp,
        }[loss_type]
        k3 = (ref - logp).exp() - (ref - logp) - 1
        total = total + (weight * (each + beta * ratio * k3)).sum()
    return total / samples["rl_scale"]


def loss_and_gradients(loss: Tensor, samples: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs = samples["trainer_logprobs"]
    gradients = torch.autograd.grad(loss, inputs, materialize_grads=True)
    return (loss.detach().double(), *(x.double() for x in gradients))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "pg"])
def test_losses(host: Host, loss_type: str, beta: float, weighted: bool) -> None:
    samples = make_samples(host, weighted)
    settings = {"beta": beta, **_SETTINGS.get(loss_type, {})}
    fn = getattr(prime_rl, loss_type)  # as their import_path is read

    def rl_loss_fn(inputs: Any) -> Any:
        return fn(inputs, **settings)

    loss, metrics = host["loss"].compute_loss(**samples, rl_loss_fn=rl_loss_fn)
    expected = loss_and_gradients(by_hand(loss_type, samples, beta), samples)
    found = loss_and_gradients(loss, samples)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)
    assert {"ratio/max", "perplexity"} <= set(metrics) and ("kl" in metrics) == (beta != 0)
    # two of the samples have tokens
    assert all(x.shape == (2,) and x.isfinite().all() for x in metrics.values())


def test_a_ratio_per_sequence(host: Host) -> None:
    samples = make_samples(host, weighted=False)
    fn = prime_rl.loss_fn("dapo")
    settings = {"importance_sampling_level": "sequence", "epsilon": 0.01}
    inputs = host["loss"].LossInputs(
        *(samples[name][2] for name in list(samples)[:5]), loss_weights=None
    )
    mask, advantages = inputs.loss_mask, inputs.advantages[inputs.loss_mask]
    delta = (inputs.trainer_logprobs - inputs.inference_logprobs)[mask]
    ratio = delta.mean().exp()
    right = -torch.minimum(ratio * advantages, ratio.clamp(0.99, 1.01) * advantages).sum()
    torch.testing.assert_close(fn(inputs, **settings).loss, right)


def test_which_losses(host: Host) -> None:
    for name in LOSSES:
        if name in SUMMED:
            samples = make_samples(host, weighted=False)
            fn = getattr(prime_rl, name)
            inputs = host["loss"].LossInputs(*(samples[x][0] for x in list(samples)[:5]))
            assert fn(inputs, **_SETTINGS.get(name, {})).loss.isfinite()
        else:
            with pytest.raises(
                ValueError, match=rf"loss_type: expected one of dapo, .* got '{name}"
            ):
                getattr(prime_rl, name)
    with pytest.raises(AttributeError, match="has no attribute 'ppo'"):
        _ = prime_rl.ppo
    with pytest.raises(ValueError, match="loss_type: expected one of"):
        prime_rl.loss_fn("ppo")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.7}, "temperature: expected none here .the host's log-prob.*got 0.7"),
        ({"entropy_coef": 0.1}, "entropy_coef: expected none here"),
        ({"rollout_correction_mode": "token_mask"}, "rollout_correction_mode: expected none here"),
        ({"loss_type": "cispo"}, "loss_type: expected none here"),
        ({"epsilonn": 0.1}, "epsilonn: expected a setting of dapo"),
        ({"beta": 0.1}, "ref_logprobs: expected the reference's"),
    ],
)
def test_settings_that_cannot_be_honoured(
    host: Host, settings: dict[str, Any], message: str
) -> None:
    samples = make_samples(host, weighted=False)
    values = {name: samples[name][0] for name in list(samples)[:5]} | {"ref_logprobs": None}
    with pytest.raises(ValueError, match=message):
        prime_rl.dapo(host["loss"].LossInputs(**values), **settings)


def check_fsdp() -> None:
    """Shard a head that is a unit by itself, each rank with a sequence of its own."""
    rank, (hidden, labels, temperature) = dist.get_rank(), make_inputs(torch.float32)

    def gradients(shard: bool) -> tuple[Tensor, Tensor]:
        lm_head = import_module("prime_rl.trainer.models.layers.lm_head")
        head = make_head({"lm_head": lm_head}, "lm_head", torch.float32)
        if shard:
            fully_shard(head, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        row = hidden.detach()[rank : rank + 1].clone().requires_grad_()
        own = [x[rank : rank + 1] for x in (labels, temperature)]
        head(row, own[0], temperature=own[1])["logprobs"].sum().backward()
        if shard:
            return row.grad, head.weight.grad.full_tensor()
        dist.all_reduce(head.weight.grad)
        return row.grad, head.weight.grad / dist.get_world_size()

    expected = gradients(shard=False)
    with prime_rl.enabled():
        torch.testing.assert_close(gradients(shard=True), expected)


def fsdp_cases(kind: str) -> dict[str, Any]:
    return PRIME_RL.with_it(kind, {"FSDP2": check_fsdp})


@pytest.mark.slow
@pytest.mark.parametrize("kind", PRIME_RL.kinds)
def test_sharded(kind: str, tmp_path: Path) -> None:
    contract.assert_passed(run_on_ranks(partial(fsdp_cases, kind), 2, tmp_path))
