"""The ways through the engine, on every backend and device against fp64; the net has no GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from grpo_kernels import SamplingMask, linear_logprobs
from grpo_kernels.testing import assert_all_as_exact_as, poisoned_allocations
from tests.support.lora_problems import NAMES, LoRAProblem, lora_problem
from tests.support.targets import targets

COLUMNS = 133
FLOOR = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Way:
    options: dict[str, int] = field(default_factory=dict)
    frozen: bool = False  # the base of the head
    adapter: bool = False
    masked: bool = False


WAYS = {
    "dlogits kept": Way(dict(activation_bytes=1 << 20)),
    "dhidden kept": Way(frozen=True),
    "slices": Way(dict(activation_bytes=0)),
    "slices of some rows": Way(dict(activation_bytes=0, max_workspace_bytes=40 * COLUMNS * 4)),
    "slices of a row": Way(dict(activation_bytes=0, max_workspace_bytes=COLUMNS * 4)),
    "an adapter": Way(adapter=True),
    "an adapter, dlogits kept": Way(dict(activation_bytes=1 << 20), adapter=True, frozen=True),
    "sampling masks": Way(masked=True),
}


def run(posed: LoRAProblem, way: Way, exact: bool = False, **options: object) -> dict[str, Tensor]:
    """Return log-probabilities, and gradients of a combination of them."""
    posed = posed.frozen() if way.frozen else posed
    problem = posed.problem
    target = torch.where(problem.mask, problem.target, -100)
    sizes = (0, 1, 5, COLUMNS)
    lists = [list(range(row, COLUMNS, 7))[: sizes[row % 4]] for row in range(target.numel())]
    name = "masked_logprobs" if way.masked else "logprobs"
    out = linear_logprobs(
        problem.hidden, posed.merged if exact and way.adapter else problem.weight, target,
        bias=problem.bias, lora=posed.lora if way.adapter and not exact else None,
        sampling_mask=SamplingMask.from_lists(lists, device=target.device) if way.masked else None,
        outputs=(name,), softcap=3.0, temperature=0.7, **options,
    )  # fmt: skip
    found = getattr(out, name)
    outer = torch.randn(target.shape, generator=torch.Generator().manual_seed(5))
    outer[:, ::5] = 0
    leaves = dict(zip(NAMES, posed.leaves if way.adapter else posed.leaves[:3], strict=False))
    leaves = {key: x for key, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad((found * outer.to(found)).sum(), list(leaves.values()))
    return {name: found.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("dtype", FLOOR)
def test_equals_fp64(
    narrow_slices: None, backend: str, device: torch.device, name: str, dtype: torch.dtype
) -> None:
    posed, way = lora_problem(vocab_size=COLUMNS), WAYS[name]
    half = posed.to(device, dtype, torch.float32)
    exact = run(posed, way, exact=True, backend="reference")
    eager = run(half, way, backend="reference")
    with poisoned_allocations():
        got = run(half, way, backend=backend, **way.options)
    assert_all_as_exact_as(got, eager, exact, FLOOR[dtype], 2e-6)
