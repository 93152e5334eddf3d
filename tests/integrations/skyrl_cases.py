"""What SkyRL's functions are held to on ranks: the whole head's values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.integrations import skyrl
from grpo_kernels.testing import assert_all_as_exact_as
from tests.integrations.host_stand_ins import SKYRL
from tests.sharded.checks import expect
from tests.support.head_problems import (
    FLOOR,
    Case,
    Modules,
    Results,
    bounds,
    eager,
    joined,
    outer,
    own,
    problem,
    shares,
    with_host,
    without,
)


def cases(kind: str) -> dict[str, Any]:
    return with_host(SKYRL, kind, _cases())


def _cases() -> Iterator[tuple[str, Case]]:
    for dtype in FLOOR:
        for backend in ("torch", "triton"):
            yield f"{dtype} {backend}", partial(check, dtype, backend)
    yield "temperature", partial(check, torch.float32, "torch", temperature=0.5)
    yield "fp32 weight, bf16 hidden states", check_mixed
    yield "inference", check_inference
    yield "entropy", check_entropy
    yield "refused", refused


def call_host(modules: Modules, hidden: Tensor, weight: Tensor, **more: Any) -> Any:
    ids = problem(torch.float32)[2]
    options = {**bounds(), "tp_group": dist.group.WORLD, "chunk_size": 3} | more
    return modules["model_utils"].from_parallel_hidden_to_logprobs(hidden, weight, ids, **options)


def check(dtype: torch.dtype, backend: str, modules: Modules, temperature: float = 1.0) -> None:
    def results() -> Results:
        hidden, weight, _ = problem(dtype)
        hidden, weight = hidden.requires_grad_(), own(weight)
        options = {"temperature": temperature, "fused_backend": backend}
        logprobs = call_host(modules, hidden, weight, **options)
        dhidden, dweight = torch.autograd.grad((logprobs * outer()).sum(), [hidden, weight])
        dhidden = dhidden.float()
        dist.all_reduce(dhidden)  # as the caller does, where the sequence is split
        return {"logprobs": logprobs.detach(), "dhidden": dhidden, "dweight": joined(dweight)}

    theirs = without(eager(dtype, temperature), "entropy")
    if shares(modules["model_utils"]) and backend == "torch":
        theirs = results()
    with skyrl.enabled():
        found = results()
    exact = without(eager(torch.float64, temperature), "entropy")
    assert_all_as_exact_as(found, theirs, exact, FLOOR[dtype], FLOOR[dtype])


def check_mixed(modules: Modules) -> None:
    hidden, weight, _ = problem(torch.bfloat16)
    with skyrl.enabled():
        out = call_host(modules, hidden.requires_grad_(), own(weight.float()))
    torch.testing.assert_close(out, eager(torch.float32)["logprobs"])
    out.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def check_inference(modules: Modules) -> None:
    hidden, weight, _ = problem(torch.float32)
    with skyrl.enabled():
        out = call_host(modules, hidden, own(weight), inference_only=True)
    assert not out.requires_grad
    torch.testing.assert_close(out, eager(torch.float32)["logprobs"])


def check_entropy(modules: Modules) -> None:
    hidden, weight, _ = problem(torch.float32)
    for temperature in (1.0, 0.5):
        with torch.no_grad(), skyrl.enabled():
            function = modules["model_utils"]._fused_vocab_parallel_entropy_from_hidden
            out = function(hidden, own(weight), dist.group.WORLD, 3, temperature)
        torch.testing.assert_close(out[:, :-1], eager(torch.float32, temperature)["entropy"])


def refused(modules: Modules) -> None:
    hidden, weight, _ = problem(torch.float32)
    with skyrl.enabled():
        call = partial(call_host, modules, hidden, own(weight))
        expect("vocab_end_index: expected", partial(call, vocab_end_index=1))
