"""linear_logprobs: values and gradients of every backend against fp64, and the torch.library op."""

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
    assert_as_exact_as,
    make_problem,
    poisoned_allocations,
    relative_error,
)
from tests.support.heads import HEADS, head_options
from tests.support.op_checks import check_backward, check_forward
from tests.support.targets import targets

# for the others see tests/engine/test_sampling_mask.py and tests/backends/test_topk.py
OUTPUTS = ALL_OUTPUTS[: ALL_OUTPUTS.index("masked_logprobs")]
BACKENDS = [name for name in available_backends() if name != "reference"]
FLOOR = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-12}


def run(problem: Problem, head: str, **kwargs: object) -> dict[str, Tensor]:
    """Return all outputs, and the gradients of a random combination of logprobs and entropy."""
    target = torch.where(problem.mask, problem.target, -100)
    out = linear_logprobs(
        problem.hidden, problem.weight, target, bias=problem.bias, outputs=OUTPUTS,
        **head_options(head, target), **kwargs,
    )  # fmt: skip
    g = torch.Generator().manual_seed(5)
    dlogp, dentropy = (
        torch.randn(problem.target.shape, generator=g, dtype=torch.float64).to(target.device)
        for _ in range(2)
    )
    loss = (out.logprobs.double() * dlogp + out.entropy.double() * dentropy).sum()
    inputs = (problem.hidden, problem.weight, problem.bias)
    gradients = torch.autograd.grad(loss, inputs)
    names = ("dhidden", "dweight", "dbias")
    values = {name: getattr(out, name) for name in OUTPUTS}
    return {**values, **dict(zip(names, gradients, strict=True))}


def assert_accurate(
    problem: Problem, dtype: torch.dtype, head: str, device: torch.device, **kwargs: object
) -> None:
    exact = run(problem.to("cpu", torch.float64), head, backend="reference")
    precision = kwargs.get("precision", "fp32")
    eager = run(problem.to(device, dtype), head, backend="reference", precision=precision)
    with poisoned_allocations():
        got = run(problem.to(device, dtype), head, **kwargs)
    assert torch.equal(got.pop("is_top1"), eager["is_top1"])
    del exact["is_top1"]
    value_floor = FLOOR[dtype] if precision == "input" else min(FLOOR[dtype], 2e-6)
    assert_all_as_exact_as(got, eager, exact, FLOOR[dtype], value_floor)


@pytest.mark.parametrize("backend,device", [*targets(), ("reference", torch.device("cpu"))])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("size", (1e-3, 3.0, 100.0))
def test_entropy_gradient_beside_a_logit_of_minus_infinity(
    backend: str, device: torch.device, dtype: torch.dtype, size: float
) -> None:
    """A probability of 0 has no share in the gradient, however large the entropy's is."""
    problem = make_problem().to(device, dtype)
    bias = problem.bias.detach().clone()
    bias[3] = -torch.inf
    target = torch.where(problem.target == 3, 4, problem.target)
    out = linear_logprobs(
        problem.hidden, problem.weight, target, bias=bias, outputs=("entropy",), backend=backend
    )
    gradients = torch.autograd.grad((out.entropy * size).sum(), (problem.hidden, problem.weight))
    finite = torch.tensor([token != 3 for token in range(53)])
    exact = make_problem()
    without = linear_logprobs(
        exact.hidden, exact.weight[finite], torch.zeros_like(target).cpu(),
        bias=exact.bias.detach()[finite], outputs=("entropy",), backend="reference",
    )  # fmt: skip
    expected = torch.autograd.grad((without.entropy * size).sum(), (exact.hidden, exact.weight))
    for value, wanted in zip(gradients, expected, strict=True):
        assert relative_error(value, wanted) < 4 * FLOOR[dtype]


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_one_row_without_a_batch_dimension(backend: str) -> None:
    problem = make_problem()
    hidden, target = problem.hidden.float()[0, 0], problem.target[0, 0]
    found = linear_logprobs(hidden, problem.weight.float(), target, top_k=2, backend=backend,
                            outputs=("logprobs", "topk_indices"))  # fmt: skip
    rows = linear_logprobs(hidden[None], problem.weight.float(), target[None], backend=backend)
    assert found.logprobs.shape == () and found.topk_indices.shape == (2,)
    torch.testing.assert_close(found.logprobs, rows.logprobs[0])


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("precision", ("fp32", "input"))
def test_backends_match_fp64(
    backend: str, device: torch.device, head: str, dtype: torch.dtype, precision: str
) -> None:
    assert_accurate(make_problem(), dtype, head, device, backend=backend, precision=precision)


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("vocab_size", (1, 2, 31, 1000))
@pytest.mark.parametrize("rows", (1, 3))
def test_odd_shapes(backend: str, device: torch.device, vocab_size: int, rows: int) -> None:
    problem = make_problem(rows, 1, hidden_size=5, vocab_size=vocab_size)
    assert_accurate(problem, torch.float32, "plain", device, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_tiles_change_no_statistic(backend: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    whole = run(problem, "softcapped", backend=backend)
    split = run(problem, "softcapped", backend=backend, max_workspace_bytes=53 * 4 * 3)
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_runs_give_the_same_bits(backend: str) -> None:
    first, second = (run(make_problem().to("cpu", torch.bfloat16), "plain", backend=backend)
                     for _ in range(2))  # fmt: skip
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", (-150.0, 150.0))
def test_offset_logits(backend: str, offset: float) -> None:
    problem = make_problem()
    shifted = Problem(**{**vars(problem), "bias": (problem.bias.detach() + offset)})
    shifted = shifted.to("cpu", torch.float64)
    exact = run(shifted, "plain", backend="reference")
    eager = run(shifted.to("cpu", torch.float32), "plain", backend="reference")
    got = run(shifted.to("cpu", torch.float32), "plain", backend=backend)
    for name in ("logprobs", "entropy", "dhidden", "dweight"):
        assert_as_exact_as(got[name], eager[name], exact[name], 2e-6, name)


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


def test_gradcheck() -> None:
    problem = make_problem(2, 3, hidden_size=4, vocab_size=11)
    target = torch.where(problem.mask, problem.target, -100)

    def outputs(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out = linear_logprobs(
            hidden, weight, target, bias=bias, temperature=0.7, softcap=4.0, logit_scale=1.2,
            outputs=("logprobs", "entropy"), backend="chunked",
        )  # fmt: skip
        return out.logprobs, out.entropy

    assert torch.autograd.gradcheck(outputs, (problem.hidden, problem.weight, problem.bias))


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


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("shape", ((0,), (3,), (2, 0)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_nothing_to_do(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    hidden = torch.randn(*shape, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(9, 4, dtype=dtype, requires_grad=True)
    target = torch.full(shape, -100)
    with poisoned_allocations():
        out = linear_logprobs(
            hidden, weight, target, outputs=("logprobs", "entropy"), backend=backend
        )
        assert out.logprobs.shape == shape
        (out.logprobs.sum() + out.entropy.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_numpy_temperature() -> None:
    """np.float32 is no subclass of float, as np.float64 is."""
    hidden, weight, target = torch.randn(3, 4), torch.randn(9, 4), torch.arange(3)
    expected = linear_logprobs(hidden, weight, target, temperature=0.5).logprobs
    temperature = np.float32(0.5)
    assert torch.equal(
        linear_logprobs(hidden, weight, target, temperature=temperature).logprobs, expected
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_contiguous_inputs(backend: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    hidden = problem.hidden.detach().transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.stack([problem.weight.detach(), problem.weight.detach()], -1)
    strided = Problem(**{**vars(problem), "hidden": hidden, "weight": wide[..., 0]})
    strided.hidden.requires_grad_()
    strided.weight.requires_grad_()
    assert not strided.weight.is_contiguous() and not strided.hidden.is_contiguous()
    expected = run(problem, "plain", backend=backend)
    for name, value in run(strided, "plain", backend=backend).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_frozen_inputs_get_no_gradient() -> None:
    problem = make_problem().to("cpu", torch.float32)
    weight = problem.weight.detach()
    out = linear_logprobs(problem.hidden, weight, problem.target)
    out.logprobs.sum().backward()
    assert problem.hidden.grad is not None and weight.grad is None


def test_autocast_multiplies_in_its_dtype_and_keeps_fp32_gradients() -> None:
    problem = make_problem().to("cpu", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = linear_logprobs(problem.hidden, problem.weight, problem.target)
    half = make_problem().to("cpu", torch.bfloat16)
    expected = linear_logprobs(half.hidden, half.weight, half.target)
    torch.testing.assert_close(out.logprobs, expected.logprobs)
    out.logprobs.sum().backward()
    assert problem.weight.grad.dtype == problem.hidden.grad.dtype == torch.float32


@pytest.mark.parametrize("length", (65536, 70001))
def test_more_rows_than_a_grid_dimension(length: int) -> None:
    hidden = torch.randn(length, 2)
    weight = torch.randn(5, 2)
    target = torch.randint(0, 5, (length,))
    out = linear_logprobs(hidden, weight, target)
    expected = (hidden @ weight.t()).log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
    torch.testing.assert_close(out.logprobs, expected)
