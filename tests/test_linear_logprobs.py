"""linear_logprobs: what ``tests/net`` does not generate: compiled backends, shapes, the op."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_kernels import available_backends, linear_logprobs
from grpo_kernels.backends import Wanted
from grpo_kernels.engine import Rows, RunOptions
from grpo_kernels.head import Head, Transform
from grpo_kernels.linear_logprobs import OUTPUTS as ALL_OUTPUTS
from grpo_kernels.testing import (
    Problem,
    assert_all_as_exact_as,
    make_problem,
    poisoned_allocations,
)
from tests.support.heads import HEADS, head_options
from tests.support.op_checks import check_backward, check_forward
from tests.support.targets import targets

# for the others see tests/engine/test_sampling_mask.py and tests/backends/test_topk.py
OUTPUTS = ALL_OUTPUTS[: ALL_OUTPUTS.index("masked_logprobs")]
BACKENDS = [name for name in available_backends() if name != "reference"]
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


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_one_row_without_a_batch_dimension(backend: str) -> None:
    problem = make_problem()
    hidden, target = problem.hidden.float()[0, 0], problem.target[0, 0]
    found = linear_logprobs(hidden, problem.weight.float(), target, top_k=2, backend=backend,
                            outputs=("logprobs", "topk_indices"))  # fmt: skip
    rows = linear_logprobs(hidden[None], problem.weight.float(), target[None], backend=backend)
    assert found.logprobs.shape == () and found.topk_indices.shape == (2,)
    torch.testing.assert_close(found.logprobs, rows.logprobs[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gap", (40.0, 16.0, -69.0))
def test_extreme_probabilities(backend: str, gap: float) -> None:
    """One logit stands ``gap`` above all others: p -> 1, or the target's p ~ 1e-30."""
    vocab = 101
    weight = torch.zeros(vocab, 1)
    weight[3] = abs(gap)
    weight.requires_grad_()
    hidden = torch.ones(2, 1, requires_grad=True)
    target = torch.tensor([3, 3] if gap > 0 else [5, 5])
    out = linear_logprobs(hidden, weight, target, outputs=("logprobs", "entropy"), backend=backend)
    others = (vocab - 1) * math.exp(-abs(gap))
    logp = -math.log1p(others) - (0 if gap > 0 else abs(gap))
    assert out.logprobs[0].item() == pytest.approx(logp, rel=1e-5, abs=1e-7)
    assert out.entropy.isfinite().all() and (out.entropy >= 0).all()
    (out.logprobs.sum() + out.entropy.sum()).backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extras", (False, True))
def test_opcheck(backend: str, extras: bool) -> None:
    problem = make_problem(1, 5, values_in=torch.float32).to("cpu", torch.float32)
    head = Head(problem.weight, problem.bias, Transform(temperature=1.5))
    rows = Rows(hidden=problem.hidden[0], head=head, target=problem.target[0])
    options = RunOptions(backend=backend, max_workspace_bytes=2 * 53 * 4)
    check_forward(rows, options, Wanted(extras))
    check_backward(rows, options, (torch.randn(5), None, None), (True, True, False, False, False))


def test_masked_rows_cost_nothing_and_give_zero() -> None:
    hidden = torch.full((3, 4), float("nan"))
    hidden[1] = 1.0
    hidden.requires_grad_()
    weight = torch.randn(9, 4, requires_grad=True)
    out = linear_logprobs(hidden, weight, torch.tensor([-100, 2, -100]), outputs=OUTPUTS)
    assert out.masked_logprobs is None
    for name in OUTPUTS:
        assert getattr(out, name)[[0, 2]].eq(0).all()
    out.logprobs.sum().backward()
    assert weight.grad.isfinite().all()
    assert torch.equal(hidden.grad[[0, 2]], torch.zeros(2, 4))


def test_numpy_temperature() -> None:
    """np.float32 is no subclass of float, as np.float64 is."""
    hidden, weight, target = torch.randn(3, 4), torch.randn(9, 4), torch.arange(3)
    expected = linear_logprobs(hidden, weight, target, temperature=0.5).logprobs
    temperature = np.float32(0.5)
    assert torch.equal(
        linear_logprobs(hidden, weight, target, temperature=temperature).logprobs, expected
    )


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("shape", ((0,), (2, 0)))
def test_nothing_to_do(backend: str, shape: tuple[int, ...]) -> None:
    hidden, weight = torch.randn(*shape, 4).requires_grad_(), torch.randn(9, 4).requires_grad_()
    target = torch.zeros(shape, dtype=torch.int64)
    out = linear_logprobs(hidden, weight, target, backend=backend)
    assert out.logprobs.shape == shape
    out.logprobs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_more_rows_than_a_grid_dimension() -> None:
    hidden, weight = torch.randn(70001, 2), torch.randn(5, 2)
    target = torch.randint(0, 5, (70001,))
    out = linear_logprobs(hidden, weight, target)
    expected = (hidden @ weight.t()).log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
    torch.testing.assert_close(out.logprobs, expected)
