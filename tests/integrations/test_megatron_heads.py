"""Heads of NeMo-RL and SkyRL on Megatron's ranks: ours give what theirs and full logits give."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.integrations import contract
from tests.integrations.contract import Adapter
from tests.integrations.host_stand_ins import NEMO_RL, SKYRL, copied, statistics
from tests.sharded.ranks import run_alone, run_on_ranks

B, S, D, V = 3, 8, 16, 54
FP32, BF16 = torch.float32, torch.bfloat16
OF_NEMO_RL = "nemo_rl.distributed.model_utils"
OF_SKYRL = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
nemo_rl, skyrl = copied("grpo_nemo_rl"), copied("grpo_skyrl")


def problem(dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (B, S, D), the weight and ids (B, S), the same on all ranks."""
    g = torch.Generator().manual_seed(6)
    hidden = torch.randn(B, S, D, generator=g).bfloat16().to(dtype)
    weight = (torch.randn(V, D, generator=g) * 0.4).bfloat16().to(dtype)
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.randint(0, V, (B, S), generator=g),
    )


def outer() -> Tensor:
    return torch.randn(B, S - 1, generator=torch.Generator().manual_seed(7))


def own(x: Tensor) -> Tensor:
    """Return this rank's rows, as a leaf."""
    part = x.detach().chunk(dist.get_world_size())[dist.get_rank()]
    return part.clone().requires_grad_()


def joined(part: Tensor) -> Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.detach())
    return torch.cat(parts)


def by_logits(dtype: torch.dtype = FP32, temperature: float = 1.0) -> tuple[Tensor, ...]:
    """Return what one process has of full logits; all but the entropies is as in a step."""
    hidden, weight, ids = problem(dtype)
    logits = (hidden @ weight.t()).float() / temperature
    logprobs, entropy = statistics(logits[:, :-1], ids[:, 1:])
    gradients = torch.autograd.grad((logprobs * outer()).sum(), [hidden, weight])
    return logprobs.detach(), *gradients, entropy.detach()


def runs(module: str) -> bool:
    """Return whether the host's own function runs on these ranks: stand-ins share nothing."""
    return dist.get_world_size() == 1 or hasattr(import_module(module), "__file__")


def options(**more: Any) -> dict[str, Any]:
    rank, rows = dist.get_rank(), V // dist.get_world_size()
    bounds = {"vocab_start_index": rank * rows, "vocab_end_index": (rank + 1) * rows}
    return {**bounds, "tp_group": dist.group.WORLD, "chunk_size": 3, **more}


def call_nemo_rl(hidden: Tensor, weight: Tensor, ids: Any = None, **more: Any) -> Tensor:
    function = import_module(OF_NEMO_RL).from_parallel_hidden_states_to_logprobs
    return function(hidden, weight, False, problem()[2] if ids is None else ids, **options(**more))


def nemo_rl_leaves(dtype: torch.dtype = FP32, split: bool = True) -> tuple[Tensor, Tensor]:
    hidden, weight, _ = problem(dtype)
    hidden = hidden.detach().transpose(0, 1).contiguous()  # (S, B, D)
    return own(hidden) if split else hidden.requires_grad_(), own(weight)


def nemo_rl_step(with_ours: bool, split: bool, dtype: torch.dtype = FP32) -> tuple[Tensor, ...]:
    # theirs takes no whole hidden states where there are more ranks
    if not with_ours and not (runs(OF_NEMO_RL) and (split or dist.get_world_size() == 1)):
        return by_logits(dtype)[:3]
    hidden, weight = nemo_rl_leaves(dtype, split)
    with nemo_rl.enabled() if with_ours else nullcontext():
        logprobs = call_nemo_rl(hidden, weight)
    dhidden, dweight = torch.autograd.grad((logprobs * outer()).sum(), [hidden, weight])
    dhidden = joined(dhidden) if split else dhidden
    return logprobs.detach(), dhidden.transpose(0, 1), joined(dweight)


def check_nemo_rl_in_place() -> None:
    """Divide the result in place, as the host does, and with one sequence, where no copy is due."""
    hidden, weight = nemo_rl_leaves(split=False)
    hidden, ids = hidden[:, :1].detach().requires_grad_(), problem()[2][:1]
    with nemo_rl.enabled():
        once, out = (call_nemo_rl(hidden, weight, ids) for _ in range(2))
        halved = torch.autograd.grad(out.div_(2).sum(), hidden)[0]
        torch.testing.assert_close(halved, torch.autograd.grad(once.sum(), hidden)[0] / 2)


def refused_nemo_rl() -> dict[str, Callable[[], Any]]:
    def call(rows: int = S, **more: Any) -> None:
        hidden, weight = nemo_rl_leaves(split=False)
        with nemo_rl.enabled():
            call_nemo_rl(hidden[:rows], weight, **more)

    start = options()["vocab_start_index"]
    return {
        "vocab_start_index: expected": partial(call, vocab_start_index=start + 1),
        "vocab_end_index: expected": partial(call, vocab_end_index=start),
        "tp_group: expected a process group": partial(call, tp_group=None),
        "tensor_parallel_hidden_states: expected 8 rows": partial(call, 3),
    }


def call_skyrl(hidden: Tensor, weight: Tensor, **more: Any) -> Tensor:
    function = import_module(OF_SKYRL).from_parallel_hidden_to_logprobs
    return function(hidden, weight, problem()[2], **options(**more))


def skyrl_step(with_ours: bool, dtype: torch.dtype = FP32, **more: Any) -> tuple[Tensor, ...]:
    if not with_ours and not (runs(OF_SKYRL) and more.get("fused_backend", "torch") == "torch"):
        return by_logits(dtype, more.get("temperature", 1.0))[:3]
    hidden, weight = problem(dtype)[0], own(problem(dtype)[1])
    with skyrl.enabled() if with_ours else nullcontext():
        logprobs = call_skyrl(hidden, weight, **more)
    dhidden, dweight = torch.autograd.grad((logprobs * outer()).sum(), [hidden, weight])
    dhidden = dhidden.float()
    dist.all_reduce(dhidden)  # as the caller does, where the sequence is split
    return logprobs.detach(), dhidden.to(dtype), joined(dweight)


def check_skyrl_scores() -> None:
    """Score at a weight in fp32, and the entropies."""
    hidden, weight, _ = problem()
    half = problem(BF16)[0]
    with skyrl.enabled():
        mixed = call_skyrl(half, own(weight))
        function = import_module(OF_SKYRL)._fused_vocab_parallel_entropy_from_hidden
        out = function(hidden, own(weight), dist.group.WORLD, 3, 0.5)
    torch.testing.assert_close(out[:, :-1], by_logits(FP32, 0.5)[3])
    torch.testing.assert_close(mixed, by_logits()[0])
    mixed.sum().backward()
    assert half.grad is not None and half.grad.dtype == BF16


Cases = dict[str, Callable[[], None]]
HOSTS: dict[str, tuple[Any, Adapter, Cases]] = {
    "NeMo-RL": (
        NEMO_RL,
        Adapter(
            package="nemo_rl",
            step=nemo_rl_step,
            settings={"sequence parallel": {"split": True}, "whole": {"split": False}},
            default={"dtype": BF16},
            switch=nemo_rl.SWITCH,
        ),
        {"in place": check_nemo_rl_in_place},
    ),
    "SkyRL": (
        SKYRL,
        Adapter(
            package="skyrl",
            step=skyrl_step,
            settings={
                "torch": {},
                "triton": {"fused_backend": "triton"},
                "temperature": {"temperature": 0.5},
            },
            default={"dtype": BF16},
            switch=skyrl.SWITCH,
        ),
        {"scores": check_skyrl_scores},
    ),
}


def cases(name: str, kind: str) -> Cases:
    if not dist.is_initialized():  # alone
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    host, adapter, more = HOSTS[name]
    if name == "NeMo-RL":
        adapter = replace(adapter, refused=refused_nemo_rl())
    return host.with_it(kind, contract.cases(adapter) | more)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(name, *kind.values, marks=kind.marks, id=f"{name}, {kind.values[0]}")
     for name, (host, *_) in HOSTS.items() for kind in host.kinds],
)  # fmt: skip
def test_ranks_equal_one_process(name: str, kind: str, size: int) -> None:
    found = partial(cases, name, kind)
    contract.assert_passed(run_alone(found) if size == 1 else run_on_ranks(found, size))
