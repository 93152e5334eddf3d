"""LoRA on the head: values and gradients against fp64 autograd on the merged weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    HeadLoRA,
    SamplingMask,
    available_backends,
    linear_logprobs,
)
from grpo_kernels.head import mkl
from grpo_kernels.testing import assert_all_as_exact_as, poisoned_allocations, relative_error
from tests.support.heads import HEADS, head_options
from tests.support.lora_problems import NAMES, LoRAProblem, lora_problem
from tests.support.targets import targets

# the interpreter runs Triton's kernels slowly: a few small cases stand for all, see test_triton
BACKENDS = [name for name in available_backends() if name not in ("reference", "triton")]
TRITON = "triton" in available_backends()
OUTPUTS = ("logprobs", "entropy", "lse", "sum_sq_probs", "max_logit", "min_logit")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOOR = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1e-3}


def run(
    posed: LoRAProblem,
    head: str = "plain",
    merged: bool = False,
    through: Sequence[str] = ("logprobs", "entropy"),
    **kwargs: object,
) -> dict[str, Tensor]:
    """Return all outputs, and the gradients of a random combination of some."""
    problem = posed.problem
    target = torch.where(problem.mask, problem.target, -100)
    out = linear_logprobs(
        problem.hidden, posed.merged if merged else problem.weight, target, bias=problem.bias,
        lora=None if merged else posed.lora, outputs=OUTPUTS,
        **head_options(head, target), **kwargs,
    )  # type: ignore[arg-type]  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    outer = torch.randn((2, *problem.target.shape), generator=generator).to(target.device)
    pairs = zip(outer, through, strict=False)
    loss = torch.stack([factor * getattr(out, name) for factor, name in pairs]).sum()
    wanted = {name: x for name, x in zip(NAMES, posed.leaves, strict=True) if x.requires_grad}
    gradients = torch.autograd.grad(loss, list(wanted.values()))
    return {
        **{name: getattr(out, name) for name in OUTPUTS},
        **dict(zip(wanted, gradients, strict=True)),
    }


def assert_accurate(
    posed: LoRAProblem,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    head: str = "plain",
    factors: torch.dtype = torch.float32,
    through: Sequence[str] = ("logprobs", "entropy"),
    **kwargs: object,
) -> None:
    exact = run(posed, head, merged=True, through=through, backend="reference")
    precision = kwargs.get("precision", "fp32")
    half = posed.to(device, dtype, factors)
    eager = run(half, head, through=through, backend="reference", precision=precision)
    with poisoned_allocations():
        got = run(half, head, through=through, **kwargs)
    value_floor = FLOOR[dtype] if precision == "input" else 2e-6
    assert_all_as_exact_as(got, eager, exact, FLOOR[dtype], value_floor)


@pytest.mark.parametrize("backend,device", targets("triton"))
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", ("fp32", "input"))
def test_backends_match_fp64(
    narrow_slices: None,
    backend: str,
    device: torch.device,
    head: str,
    dtype: torch.dtype,
    precision: str,
) -> None:
    tile = 53 * 4 * 5  # five rows
    assert_accurate(
        lora_problem(), dtype, device, head,
        backend=backend, precision=precision, max_workspace_bytes=tile,
    )  # fmt: skip


@pytest.mark.skipif(not TRITON, reason="no Triton on this machine")
@pytest.mark.parametrize(
    "dtype,precision",
    ((torch.float32, "fp32"), (torch.bfloat16, "fp32"), (torch.float16, "input")),
)
def test_triton(narrow_slices: None, dtype: torch.dtype, precision: str) -> None:
    posed = lora_problem(sequences=2, length=3, hidden_size=8, vocab_size=37)
    tile = 37 * 4 * 2  # two rows
    assert_accurate(
        posed, dtype, "cpu", "softcapped",
        backend="triton", precision=precision, max_workspace_bytes=tile,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factors", (torch.bfloat16, torch.float16, torch.float64))
def test_factors_of_any_dtype(backend: str, dtype: torch.dtype, factors: torch.dtype) -> None:
    assert_accurate(lora_problem(), dtype, factors=factors, backend=backend)


@pytest.mark.parametrize("backend,device", targets("triton"))
@pytest.mark.parametrize("vocab_size,rank", ((1, 1), (2, 5), (31, 8), (1000, 1), (129, 17)))
@pytest.mark.parametrize("rows", (1, 3))
def test_odd_shapes(
    backend: str, device: torch.device, vocab_size: int, rank: int, rows: int
) -> None:
    shape = dict(sequences=rows, length=1, hidden_size=5, vocab_size=vocab_size)
    for dtype in (torch.float32, torch.bfloat16):
        assert_accurate(lora_problem(rank, **shape), dtype, device, backend=backend)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", (0, 3))
def test_nothing_to_do(backend: str, dtype: torch.dtype, rows: int) -> None:
    posed = lora_problem(sequences=1, length=rows).to("cpu", dtype, torch.float32)
    target = torch.full((1, rows), -100)
    with poisoned_allocations():
        out = linear_logprobs(
            posed.problem.hidden, posed.problem.weight, target, lora=posed.lora, backend=backend
        )
        assert out.logprobs is not None
        out.logprobs.sum().backward()
    for x in (posed.lora.a, posed.lora.b, posed.problem.weight):
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_frozen_base(backend: str, dtype: torch.dtype) -> None:
    posed = lora_problem().to("cpu", dtype, torch.float32)
    whole, got = run(posed, backend=backend), run(posed.frozen(), backend=backend)
    assert set(whole) - set(got) == {"dweight", "dbias"}
    assert all(torch.equal(value, whole[name]) for name, value in got.items())
    first = replace(posed.frozen(), lora=replace(posed.lora, b=posed.lora.b.detach()))
    assert torch.equal(run(first, backend=backend)["da"], whole["da"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_updates_below_the_weights_resolution_count(backend: str, dtype: torch.dtype) -> None:
    posed = lora_problem(size=1e-5)
    half = posed.to("cpu", dtype, torch.float32)
    merged = half.merged.detach().to(dtype)
    assert (merged == half.problem.weight).float().mean() > 0.95
    zero = replace(posed.lora, b=torch.zeros_like(posed.lora.b).requires_grad_())
    changes = [
        run(one, merged=exact, backend=name)["logprobs"].detach().double()
        - run(LoRAProblem(one.problem, replace(one.lora, b=zero.b.to(one.lora.b))),
              merged=exact, backend=name)["logprobs"].detach().double()
        for one, exact, name in ((half, False, backend), (posed, True, "reference"))
    ]  # fmt: skip
    # what is left is the rounding of fp32 log-probabilities of about 4
    assert changes[1].abs().max() > 5e-6
    torch.testing.assert_close(*changes, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", (1e-8, 1e4))
def test_fp16_gradients_of_factors_that_fp16_does_not_hold(backend: str, size: float) -> None:
    posed = lora_problem(size=size)
    if size > 1:  # keeps the logits small
        posed = replace(posed, lora=replace(posed.lora, scaling=1e-4))
    assert_accurate(posed, torch.float16, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", (1e-8, 0.3))
def test_kept_logits(backend: str, dtype: torch.dtype, size: float) -> None:
    """Each row has a factor of its own, beside the scale that fp16 needs."""
    assert_accurate(
        lora_problem(size=size), dtype, "cpu", "softcapped", through=["logprobs"],
        backend=backend, activation_bytes=1 << 20,
    )  # fmt: skip


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


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_sampling_masks(backend: str, dtype: torch.dtype) -> None:
    posed = lora_problem()
    logits = (posed.problem.hidden @ posed.merged.t() + posed.problem.bias).detach()
    sampling_mask = SamplingMask.from_padded(logits.topk(12).indices)

    def masked_logprobs(one: LoRAProblem, **options: object) -> dict[str, Tensor]:
        problem = one.problem
        out = linear_logprobs(
            problem.hidden, options.pop("weight", problem.weight), problem.target,
            bias=problem.bias, sampling_mask=sampling_mask, outputs=("masked_logprobs",), **options,
        )  # type: ignore[arg-type]  # fmt: skip
        assert out.masked_logprobs is not None
        gradients = torch.autograd.grad(out.masked_logprobs.sum(), one.leaves)
        named = dict(zip(NAMES, gradients, strict=True))
        return {"masked_logprobs": out.masked_logprobs.detach(), **named}

    exact = masked_logprobs(posed, weight=posed.merged, backend="reference")
    half = posed.to("cpu", dtype, torch.float32)
    eager = masked_logprobs(half, lora=half.lora, backend="reference")
    got = masked_logprobs(half, lora=half.lora, backend=backend)
    assert_all_as_exact_as(got, eager, exact, FLOOR[dtype], 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariance(backend: str, dtype: torch.dtype) -> None:
    posed = lora_problem(sequences=1, length=300, hidden_size=40, vocab_size=131, rank=4)
    posed = posed.to("cpu", dtype, torch.float32)
    hidden, target = posed.problem.hidden[0], posed.problem.target[0]

    def rows(part: slice) -> Tensor:
        out = linear_logprobs(
            hidden[part], posed.problem.weight, target[part], bias=posed.problem.bias,
            lora=posed.lora, backend=backend, batch_invariant=True,
        )  # fmt: skip
        assert out.logprobs is not None
        return out.logprobs.detach()

    whole = rows(slice(0, 300))
    for part in (slice(0, 1), slice(7, 12), slice(280, 300)):
        assert torch.equal(rows(part), whole[part])


def test_strided_factors() -> None:
    posed = lora_problem().to("cpu", torch.float32, torch.float32)
    a, b = (x.detach().t().contiguous().t().requires_grad_() for x in (posed.lora.a, posed.lora.b))
    assert not a.is_contiguous() and not b.is_contiguous()
    strided = LoRAProblem(posed.problem, replace(posed.lora, a=a, b=b))
    for backend in BACKENDS:
        expected = run(posed, backend=backend)
        for name, value in run(strided, backend=backend).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_gradcheck() -> None:
    posed = lora_problem(sequences=1, length=3, hidden_size=3, vocab_size=7, rank=2)
    problem = posed.problem

    def outputs(hidden: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor):
        out = linear_logprobs(
            hidden, weight, problem.target, bias=bias, lora=HeadLoRA(a=a, b=b, scaling=0.7),
            softcap=4.0, outputs=("logprobs", "entropy"), backend="chunked",
        )  # fmt: skip
        return out.logprobs, out.entropy

    assert torch.autograd.gradcheck(outputs, posed.leaves)


def test_where_torch_brings_no_product_with_fp32_sums(
    narrow_slices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mkl, "available", lambda dtype: False)
    for dtype in DTYPES:
        assert_accurate(lora_problem(), dtype, backend="chunked", max_workspace_bytes=53 * 4 * 5)
