"""The ways through the engine, on every backend and device against fp64; the net has no GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from grpo_kernels import HeadLoRA, SamplingMask, linear_logprobs
from grpo_kernels.testing import assert_all_as_exact_as, make_problem, poisoned_allocations
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
    size: float = 0.3  # of the factors
    scaling: float = 0.75


WAYS = {
    "dlogits kept": Way(dict(activation_bytes=1 << 20)),
    "dhidden kept": Way(frozen=True),
    "slices": Way(dict(activation_bytes=0)),
    "slices of some rows": Way(dict(activation_bytes=0, max_workspace_bytes=40 * COLUMNS * 4)),
    "slices of a row": Way(dict(activation_bytes=0, max_workspace_bytes=COLUMNS * 4)),
    "an adapter": Way(adapter=True),
    "an adapter, dlogits kept": Way(dict(activation_bytes=1 << 20), adapter=True, frozen=True),
    "tiny factors": Way(adapter=True, size=1e-8),
    "huge factors": Way(adapter=True, size=1e4, scaling=1e-4),
    "huge factors, dlogits kept": Way(
        dict(activation_bytes=1 << 20), adapter=True, size=1e4, scaling=1e-4
    ),
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
    dlogprobs = torch.randn(target.shape, generator=torch.Generator().manual_seed(5))
    dlogprobs[:, ::5] = 0
    leaves = dict(zip(NAMES, posed.leaves if way.adapter else posed.leaves[:3], strict=False))
    leaves = {key: x for key, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad((found * dlogprobs.to(found)).sum(), list(leaves.values()))
    return {name: found.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("dtype", FLOOR)
def test_equals_fp64(
    narrow_slices: None, backend: str, device: torch.device, name: str, dtype: torch.dtype
) -> None:
    way = WAYS[name]
    posed = lora_problem(size=way.size, vocab_size=COLUMNS)
    posed = replace(posed, lora=replace(posed.lora, scaling=way.scaling))
    half = posed.to(device, dtype, torch.float32)
    exact = run(posed, way, exact=True, backend="reference")
    eager = run(half, way, backend="reference")
    with poisoned_allocations():
        got = run(half, way, backend=backend, **way.options)
    assert_all_as_exact_as(got, eager, exact, FLOOR[dtype], 2e-6)


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("of_head", (False, True))
def test_a_row_without_a_softmax_counts_where_it_has_a_gradient(
    backend: str, device: torch.device, of_head: bool
) -> None:
    problem = make_problem().to(device, torch.float32)
    hidden = problem.hidden.detach().clone()
    hidden[0, 1] = torch.nan
    hidden.requires_grad_()
    weight = problem.weight.detach().requires_grad_(of_head)
    for dlogp, spoilt in ((0.0, False), (1.0, True)):
        out = linear_logprobs(
            hidden, weight, problem.target, backend=backend, activation_bytes=1 << 20
        )
        factor = torch.ones_like(out.logprobs)
        factor[0, 1] = dlogp
        inputs = (hidden, weight) if of_head else (hidden,)
        gradients = torch.autograd.grad(out.logprobs, inputs, factor)
        assert gradients[0][0, 1].isnan().all() == spoilt
        assert gradients[0][1:].isfinite().all()
        assert all(x.isfinite().all() != spoilt for x in gradients[1:])


def test_ways_to_build_a_sampling_mask() -> None:
    lists = [[7, 2, 7], [], [0]]
    built = [
        SamplingMask.from_lists(lists),
        SamplingMask.from_padded(torch.tensor([[7, 2, 7], [-1, -1, -1], [-1, 0, -1]])),
        SamplingMask.from_csr(torch.tensor([7, 2, 7, 0]), torch.tensor([0, 3, 3, 4])),
        SamplingMask.from_csr(torch.tensor([7, 2, 7, 0]).int(), torch.tensor([0, 3, 3, 4]).int()),
    ]
    for mask in built:
        assert mask.indices.tolist() == [2, 7, 0] and mask.indices.dtype == torch.int64
        assert mask.offsets.tolist() == mask.bounds.tolist() == [0, 2, 2, 3]
        assert (mask.num_rows, mask.max_id, mask.rows.tolist()) == (3, 7, [0, 0, 2])
    empty = SamplingMask.from_lists([[], []])
    assert empty.num_rows == 2 and empty.indices.numel() == 0


@pytest.mark.parametrize("scaling", (1.0, -0.5))
def test_joined_adapters_are_their_sum(scaling: float) -> None:
    first = lora_problem(rank=2).lora
    second = replace(lora_problem(rank=5).lora, scaling=scaling)
    joined = HeadLoRA.joined([first, second])
    assert joined is not None and joined.rank == 7
    torch.testing.assert_close(
        joined.scaling * joined.b @ joined.a,
        sum(one.scaling * one.b @ one.a for one in (first, second)),
    )
    assert joined.a.requires_grad and joined.b.requires_grad
    assert HeadLoRA.joined([first]) is first and HeadLoRA.joined([]) is None
