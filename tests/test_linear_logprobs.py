"""linear_logprobs: what ``tests/net`` does not generate: compiled backends, shapes, the op."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_kernels import available_backends, linear_logprobs
from grpo_kernels.linear_logprobs import OUTPUTS as ALL_OUTPUTS
from grpo_kernels.testing import (
    Problem,
    assert_all_as_exact_as,
    make_problem,
    poisoned_allocations,
)
from tests.support.heads import HEADS, head_options
from tests.support.targets import targets

# for the others see tests/net and tests/backends/test_topk.py
OUTPUTS = ALL_OUTPUTS[: ALL_OUTPUTS.index("masked_logprobs")]
COMPILED = ((torch.float32, "fp32"), (torch.bfloat16, "fp32"), (torch.float16, "input"))
FLOOR = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


@pytest.mark.parametrize("backend,device", targets("cpu", "chunked"))
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype,precision", COMPILED)
def test_every_output_on_a_gpu_and_in_triton(
    backend: str, device: torch.device, head: str, dtype: torch.dtype, precision: str
) -> None:
    def outputs(problem: Problem, **options: str) -> dict[str, Tensor]:
        target = torch.where(problem.mask, problem.target, -100)
        leaves = {name: getattr(problem, name) for name in ("hidden", "weight", "bias")}
        options |= head_options(head, target)
        out = linear_logprobs(target=target, outputs=OUTPUTS, **leaves, **options)
        values = {name: getattr(out, name) for name in OUTPUTS if name != "is_top1"}
        signs = torch.arange(target.numel()).view(target.shape).to(target.device) % 2 * 2 - 1
        total = (out.logprobs.double() * signs + out.entropy.double()).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()))
        return values | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}

    problem = make_problem(3, 4, hidden_size=5, vocab_size=31)
    exact = outputs(problem, backend="reference")
    eager = outputs(problem.to(device, dtype), backend="reference", precision=precision)
    with poisoned_allocations():
        got = outputs(problem.to(device, dtype), backend=backend, precision=precision)
    value_floor = FLOOR[dtype] if precision == "input" else 2e-6
    assert_all_as_exact_as(got, eager, exact, FLOOR[dtype], value_floor)


@pytest.mark.parametrize("backend", sorted({"cpu", "chunked"} & {*available_backends()}))
def test_digits_beside_a_target_that_is_nearly_certain(backend: str) -> None:
    """1 - p is a sum of the others there; eager, by which the net allows errors, subtracts."""
    peaks = torch.tensor([8.0, 10.0, 12.0, 14.0, 16.0])
    hidden = torch.nn.functional.pad(peaks[:, None], (0, 2)).requires_grad_()
    weight, target = torch.eye(3), torch.zeros(5, dtype=torch.int64)
    out = linear_logprobs(hidden, weight, target, backend=backend)
    (gradient,) = torch.autograd.grad(out.logprobs.sum(), hidden)
    others = 1 / (2 + peaks.double().exp())
    exact = torch.stack([2 * others, -others, -others], 1)
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=0)


def test_numpy_temperature() -> None:
    """np.float32 is no subclass of float, as np.float64 is."""
    hidden, weight, target = torch.randn(3, 4), torch.randn(9, 4), torch.arange(3)
    expected = linear_logprobs(hidden, weight, target, temperature=0.5).logprobs
    temperature = np.float32(0.5)
    assert torch.equal(
        linear_logprobs(hidden, weight, target, temperature=temperature).logprobs, expected
    )
