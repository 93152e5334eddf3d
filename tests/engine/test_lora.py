"""LoRA on the head: what generated cases do not reach, the op, memory, explanations, bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels import HeadLoRA, available_backends, explain_logprobs, linear_logprobs
from grpo_kernels.engine import Rows, RunOptions
from grpo_kernels.head import Head, Transform, mkl
from grpo_kernels.testing import assert_all_as_exact_as, poisoned_allocations, relative_error
from tests.support.lora_problems import NAMES, LoRAProblem, largest_allocation, lora_problem
from tests.support.op_checks import check_backward, check_forward

BACKENDS = [name for name in available_backends() if name not in ("reference", "triton")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOOR = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1e-3}
SEVERAL_TILES = {"max_workspace_bytes": 53 * 4 * 5}


def run(
    posed: LoRAProblem,
    merged: bool = False,
    outputs: tuple[str, ...] = ("logprobs", "entropy"),
    **options: object,
) -> dict[str, Tensor]:
    """Return some outputs, and the gradients of a random combination of them."""
    problem = posed.problem
    target = torch.where(problem.mask, problem.target, -100)
    out = linear_logprobs(
        problem.hidden, posed.merged if merged else problem.weight, target, bias=problem.bias,
        lora=None if merged else posed.lora, outputs=outputs, softcap=3.0, **options,
    )  # type: ignore[arg-type]  # fmt: skip
    found = {name: getattr(out, name) for name in outputs}
    outer = torch.randn(len(found), *target.shape, generator=torch.Generator().manual_seed(5))
    total = sum((x * factor).sum() for x, factor in zip(found.values(), outer, strict=True))
    return found | dict(zip(NAMES, torch.autograd.grad(total, posed.leaves), strict=True))


def assert_accurate(
    posed: LoRAProblem, dtype: torch.dtype, factors: torch.dtype = torch.float32, **options: object
) -> None:
    outputs = {"outputs": options.pop("outputs", ("logprobs", "entropy"))}
    exact = run(posed, merged=True, backend="reference", **outputs)
    half = posed.to("cpu", dtype, factors)
    eager = run(half, backend="reference", **outputs)
    with poisoned_allocations():
        got = run(half, **outputs, **options)
    assert_all_as_exact_as(got, eager, exact, FLOOR[dtype], 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factors", (torch.bfloat16, torch.float16, torch.float64))
def test_factors_of_any_dtype(backend: str, dtype: torch.dtype, factors: torch.dtype) -> None:
    assert_accurate(lora_problem(rank=17), dtype, factors, backend=backend, **SEVERAL_TILES)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size,scaling", ((1e-8, 0.75), (1e4, 1e-4)))
@pytest.mark.parametrize("kept", (False, True))
def test_gradients_of_factors_that_fp16_does_not_hold(
    backend: str, size: float, scaling: float, kept: bool
) -> None:
    """Kept logits have a factor a row beside the scale that fp16 needs."""
    posed = lora_problem(size=size)
    posed = replace(posed, lora=replace(posed.lora, scaling=scaling))
    options = dict(outputs=("logprobs",), activation_bytes=1 << 20) if kept else {}
    assert_accurate(posed, torch.float16, backend=backend, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_torch_brings_no_product_with_fp32_sums(
    narrow_slices: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(mkl, "available", lambda dtype: False)
    assert_accurate(lora_problem(), dtype, backend="chunked", **SEVERAL_TILES)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_updates_below_the_weights_resolution_count(backend: str, dtype: torch.dtype) -> None:
    posed = lora_problem(size=1e-5)
    half = posed.to("cpu", dtype, torch.float32)
    merged = half.merged.detach().to(dtype)
    assert (merged == half.problem.weight).float().mean() > 0.95

    def change(one: LoRAProblem, **options: object) -> Tensor:
        zero = replace(one.lora, b=torch.zeros_like(one.lora.b).requires_grad_())
        both = (run(x, **options)["logprobs"] for x in (one, replace(one, lora=zero)))
        return torch.sub(*(x.detach().double() for x in both))

    exact = change(posed, merged=True, backend="reference")
    # what is left is the rounding of fp32 log-probabilities of about 4
    assert exact.abs().max() > 5e-6
    torch.testing.assert_close(change(half, backend=backend), exact, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast_leaves_the_factors_alone(backend: str, dtype: torch.dtype) -> None:
    full = lora_problem().to("cpu", torch.float32, torch.float32)
    half = lora_problem().to("cpu", dtype, torch.float32)
    with torch.autocast("cpu", dtype):
        got = run(full, backend=backend)
    expected = run(half, backend=backend)
    for name, value in got.items():
        assert value.dtype == torch.float32
        assert relative_error(value, expected[name]) <= FLOOR[dtype], name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_in_more_rows_than_a_block(backend: str, dtype: torch.dtype) -> None:
    posed = lora_problem(sequences=1, length=300, hidden_size=40, vocab_size=131, rank=4)
    posed = posed.to("cpu", dtype, torch.float32)
    hidden, target = posed.problem.hidden[0], posed.problem.target[0]

    def rows(part: slice) -> Tensor:
        args = (hidden[part], posed.problem.weight, target[part])
        options = dict(lora=posed.lora, backend=backend, batch_invariant=True)
        return linear_logprobs(*args, bias=posed.problem.bias, **options).logprobs

    whole = rows(slice(0, 300))
    for part in (slice(0, 1), slice(7, 12), slice(280, 300)):
        assert torch.equal(rows(part), whole[part])


def test_strided_factors() -> None:
    posed = lora_problem().to("cpu", torch.float32, torch.float32)
    a, b = (x.detach().t().contiguous().t().requires_grad_() for x in (posed.lora.a, posed.lora.b))
    strided = replace(posed, lora=replace(posed.lora, a=a, b=b))
    for backend in BACKENDS:
        expected = run(posed, backend=backend)
        for name, value in run(strided, backend=backend).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str) -> None:
    posed = lora_problem(sequences=1, length=5).to("cpu", torch.float32, torch.float32)
    problem = posed.problem
    head = Head(problem.weight, problem.bias, Transform(temperature=1.5), posed.lora)
    rows = Rows(hidden=problem.hidden[0], head=head, target=problem.target[0])
    options = RunOptions(backend=backend, max_workspace_bytes=2 * 53 * 4)
    check_forward(rows, options)
    check_backward(rows, options, (torch.randn(5), None, None), (True, False, False, True, True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_weight_sized_tensor(backend: str) -> None:
    posed = lora_problem(sequences=1, length=3, hidden_size=64, vocab_size=999, rank=4)
    posed = posed.to("cpu", torch.float32, torch.float32).frozen()
    problem = posed.problem

    def run(weight: Tensor, lora: HeadLoRA | None) -> int:
        with largest_allocation() as seen:
            args = (problem.hidden, weight, problem.target)
            linear_logprobs(*args, lora=lora, backend=backend).logprobs.sum().backward()
        return seen.elements

    assert 0 < run(problem.weight, posed.lora) < problem.weight.numel() / 2
    assert posed.lora.a.grad is not None and posed.lora.b.grad is not None
    assert run(posed.merged, None) >= problem.weight.numel()  # of its gradient


def test_explain_says_it() -> None:
    posed = lora_problem().to("cpu", torch.bfloat16, torch.float32)
    head = (posed.problem.hidden, posed.problem.weight)
    assert "LoRA of rank 3" in explain_logprobs(*head, lora=posed.lora).fingerprint
    assert "LoRA" not in explain_logprobs(*head).fingerprint
    if "triton" in available_backends():
        tiled = explain_logprobs(*head, lora=posed.lora, backend="triton")
        assert tiled.forward.startswith("logits tile")
