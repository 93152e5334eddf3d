"""The forwards without a tile of logits against fp64: native ones of every ISA, and Triton's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import HeadLoRA
from grpo_kernels.backends.base import EXTRAS, RowStats
from grpo_kernels.head import Head, Transform
from grpo_kernels.testing import poisoned_allocations
from tests.backends.conftest import Kernels
from tests.backends.problems import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    PLAIN,
    SPECIAL_ROWS,
    TRANSFORMS,
    head_problem,
    logits_of,
    same,
    statistics,
    transform_of,
)

# the interpreter computes with numpy, which warns where a GPU gives inf or NaN without a word
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
    pytest.mark.usefixtures("small_tiles"),  # Triton's
]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest, kernels: Kernels) -> torch.dtype:
    if request.param == FP32 and not kernels.native:
        pytest.skip("Triton's forward is for 16 bits")
    if request.param == FP16 and kernels.interpreted and request.function is not test_transforms:
        pytest.skip("one dtype is enough for the slow interpreter")
    return request.param


def check(
    kernels: Kernels, hidden: Tensor, head: Head, target: Tensor, precision: str = "fp32"
) -> RowStats:
    """Check statistics against fp64: at most twice eager's error, plus roundings of the largest."""
    with poisoned_allocations():
        stats, lean = (kernels.linear(hidden, head, target, precision, x) for x in (True, False))
    assert all(getattr(lean, name) is None for name in EXTRAS) and same(lean, stats)
    exact, eager = (
        statistics(logits_of(hidden, head, precision, wide), target, head.transform)
        for wide in (torch.float64, FP32)
    )
    for name, actual in stats._asdict().items():
        if name == "is_top1" or actual is None:
            continue
        truth = getattr(exact, name)
        error, allowed = ((x.double() - truth).abs().max() for x in (actual, getattr(eager, name)))
        slack = 2e-7 * exact.max_logit.abs().max().clamp(min=10)
        assert error <= 2 * allowed + slack, f"{name}: error {error:.3e}, eager's {allowed:.3e}"
    assert stats.lse.dtype == torch.float64 and (stats.entropy >= 0).all()
    logits = logits_of(hidden, head, precision, torch.float64)
    first, second = logits.topk(min(2, logits.shape[1])).values[:, [0, -1]].unbind(-1)
    clear = (first - second > 1e-4) | (logits.shape[1] == 1)
    assert torch.equal(stats.is_top1[clear], exact.is_top1[clear])
    return stats


def posed(
    kernels: Kernels, tokens: int, depth: int, columns: int, *options: Any, **named: Any
) -> tuple[Tensor, Head, Tensor]:
    """Return a problem; the interpreter, which is slow, gets a small one."""
    if kernels.interpreted:
        tokens, depth, columns = min(tokens, 35), min(depth, 24), min(columns, 150)
    return head_problem(tokens, depth, columns, *options, **named, device=kernels.device)


# the last ones have several chunks of tokens, and a depth beyond one block
SHAPES = [
    (1, 33, 17), (5, 2, 129), (17, 64, 1024), (49, 100, 1025), (33, 300, 2500),
    (511, 40, 300), (513, 40, 300), (3, 1111, 200),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(kernels, shape, dtype):
    if kernels.interpreted and shape[2] > 150:
        pytest.skip("as test_transforms")
    check(kernels, *posed(kernels, *shape, dtype))


@pytest.mark.parametrize("tokens", [1, 16, 33])
@pytest.mark.parametrize("columns", [1, 17, 64, 129])
@pytest.mark.parametrize("depth", [1, 5, 32])
def test_odd_shapes(kernels, tokens, columns, depth):
    check(kernels, *posed(kernels, tokens, depth, columns, BF16, False))


def test_no_tokens(kernels, dtype):
    found = kernels.linear(*posed(kernels, 0, 8, 30, dtype), "fp32", True)
    assert [x.shape for x in found[:7]] == [(0,)] * 7


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_transforms(kernels, name, dtype, bias):
    hidden, head, target = posed(kernels, 53, 40, 200, dtype, bias)
    transform = transform_of(name, len(hidden), kernels.device)
    check(kernels, hidden, replace(head, transform=transform), target)


@pytest.mark.parametrize("bias", [False, True])
def test_input_precision_rounds_product_and_sum(kernels, dtype, bias):
    """Products are exact here, so that every order of summation rounds to the same logit."""
    if dtype == FP32:
        pytest.skip("nothing is rounded")
    hidden, head, target = posed(kernels, 15, 40, 500, dtype, bias)
    hidden, weight = ((32 * x.float()).round().div(32).to(dtype) for x in (hidden, head.weight))
    for name in ("plain", "scale"):
        head = replace(head, weight=weight, transform=transform_of(name, 15, kernels.device))
        check(kernels, hidden, head, target, "input")
        rounded, exact = (
            kernels.linear(hidden, head, target, precision, False)
            for precision in ("input", "fp32")
        )
        assert not same(exact, rounded)


@pytest.mark.parametrize("kind", [name for name in SPECIAL_ROWS if "absent" not in name])
def test_special_rows(kernels, kind):
    """Each hidden state picks its row out of the weight."""
    logits, target = SPECIAL_ROWS[kind]()
    columns = kernels.size(logits.shape[1], 300)
    weight = logits.gather(1, target[:, None]).repeat(1, columns + 1)
    weight[:, 1:] = logits[:, -columns:]
    weight = weight.t().to(kernels.device, FP32 if kernels.native else BF16)
    hidden = torch.eye(len(logits), device=kernels.device).to(weight.dtype)
    place = torch.where(target < logits.shape[1] - columns, 0, target - logits.shape[1])
    head, target = Head(weight, None, PLAIN), (place % (columns + 1)).to(kernels.device)
    exact = statistics(logits_of(hidden, head, "fp32", torch.float64), target, PLAIN).logp
    stats = check(kernels, hidden, head, target)
    if kind == "nearly certain" and kernels.native:  # no digits are lost beside the 1 of the target
        torch.testing.assert_close(stats.logp.double(), exact, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("transform", [PLAIN, Transform(softcap=3.0)])
def test_top1_is_the_first_of_equal_maxima(kernels, transform):
    columns = kernels.size(5000, 300)
    first, second, last = columns // 2, columns // 2 + 1, columns - 20
    weight = torch.zeros(columns, 1, dtype=BF16, device=kernels.device)
    weight[[first, second, last]] = 1.0
    target = torch.tensor([first, second, last, 0], device=kernels.device)
    hidden = torch.ones(4, 1, dtype=BF16, device=kernels.device)
    stats = kernels.linear(hidden, Head(weight, None, transform), target, "fp32", True)
    assert stats.is_top1.tolist() == [True, False, False, False]


def test_infinite_bias(kernels, dtype):
    hidden, head, target = posed(kernels, 4, 40, 1500, dtype)
    bias = head.bias.clone()
    columns = len(bias)
    lost = columns * 2 // 3
    bias[:lost] = -math.inf
    target[:] = torch.tensor([0, columns - 9, columns - 9, columns - 1])
    stats = kernels.linear(hidden, replace(head, bias=bias), target, "fp32", True)
    rest = replace(head, weight=head.weight[lost:], bias=bias[lost:])
    exact = check(kernels, hidden, rest, (target - lost).clamp(min=0))
    assert stats.logp[0] == -math.inf and (stats.min_logit == -math.inf).all()
    for name in ("entropy", "lse", "max_logit", "sum_sq_probs"):
        torch.testing.assert_close(getattr(stats, name), getattr(exact, name))
    torch.testing.assert_close(stats.logp[1:], exact.logp[1:])


@pytest.mark.parametrize("bad,softcap", [(math.nan, None), (math.nan, 5.0), (math.inf, None)])
def test_nan_stays_in_its_row(kernels, dtype, bad, softcap):
    hidden, head, target = posed(kernels, 33, 40, 300, dtype)
    head = replace(head, transform=Transform(softcap=softcap))
    clean = kernels.linear(hidden, head, target, "fp32", True)
    hidden[5, -1] = bad
    stats = kernels.linear(hidden, head, target, "fp32", True)
    others = torch.arange(33, device=kernels.device) != 5
    for before, after in zip(clean[:7], stats[:7], strict=True):
        assert torch.equal(before[others], after[others])
        assert after.dtype == torch.bool or after[5].isnan()


def test_strides(kernels, dtype):
    hidden, head, target = posed(kernels, 19, 24, 1100, dtype)
    each = torch.linspace(0.5, 1.5, 19, device=kernels.device)
    head = replace(head, transform=Transform(temperature=each))
    expected = kernels.linear(hidden, head, target, "fp32", True)

    def embedded(x: Tensor) -> Tensor:
        """Copy it to between NaNs, in rows that start at odd places."""
        storage = x.new_full((2 * x.shape[0], x.shape[1] + 5), math.nan)
        return storage[::2, 3 : 3 + x.shape[1]].copy_(x)

    def apart(x: Tensor) -> Tensor:
        return x.repeat_interleave(2)[::2]

    transposed = head.weight.t().contiguous().t()
    for other in (
        (embedded(hidden), head, target),
        (hidden, replace(head, weight=transposed), target),
        (hidden, replace(head, transform=Transform(temperature=apart(each))), apart(target)),
    ):
        assert same(expected, kernels.linear(*other, "fp32", True))
    strided = replace(head, weight=embedded(head.weight), bias=apart(head.bias))
    got = check(kernels, embedded(hidden), strided, target)
    assert not kernels.native or same(expected, got)
    check(kernels, embedded(hidden)[:1], strided.rows(slice(1)), target[:1])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("precision", ["fp32", "input"])
def test_same_bits_for_any_threads_and_batch(kernels, dtype, precision):
    tokens, depth, columns = (600, 70, 3000) if kernels.native else (70, 24, 150)
    hidden, head, target = head_problem(tokens, depth, columns, dtype, device=kernels.device)
    temperature = torch.rand(tokens, device=kernels.device) + 0.5
    head = replace(head, transform=Transform(temperature=temperature))

    def run(rows: slice | Tensor, threads: int) -> RowStats:
        torch.set_num_threads(threads)
        return kernels.linear(hidden[rows], head.rows(rows), target[rows], precision, True)

    whole = run(slice(None), 1)
    for threads in (1, 2, 3) if kernels.native else ():
        assert same(whole, run(slice(None), threads))
    order = torch.randperm(tokens, device=kernels.device)
    more = torch.arange(tokens + 10, device=kernels.device) % tokens
    ends = (slice(0, 1), slice(3, 4), slice(tokens - 1, tokens), slice(1, tokens - 20))
    for rows in (order, order[:50], more, *ends):
        assert same(whole.rows(rows), run(rows, 2))


@pytest.mark.parametrize("precision", ["fp32", "input"])
@pytest.mark.parametrize("rank", [None, 1, 8, 19])
def test_logits_along_with_their_statistics(kernels, dtype, precision, rank):
    """Without an adapter and with one; several chunks of tokens and blocks of the vocabulary."""
    if not kernels.native:
        pytest.skip("Triton forms none")
    rounding = {FP32: 1e-6, BF16: 1e-2, FP16: 1e-3}[dtype if precision == "input" else FP32]
    for tokens, depth, columns in ((1, 3, 1), (17, 33, 131), (531, 20, 1027)):
        hidden, head, target = head_problem(tokens, depth, columns, dtype)
        head = replace(head, transform=Transform(softcap=4.0, temperature=0.7))
        if rank is not None:
            a, b = torch.randn(rank, depth), torch.randn(columns, rank)
            head = replace(head, lora=HeadLoRA(a=a, b=b, scaling=0.3))
        storage = torch.full((tokens, columns + 3), math.nan)
        logits = storage[:, :columns]
        stats = kernels.linear(hidden, head, target, precision, True, logits)
        assert same(stats, kernels.linear(hidden, head, target, precision, True))
        assert storage[:, columns:].isnan().all()
        exact = logits_of(hidden, head, precision, torch.float64)
        assert (logits.double() - exact).abs().max() < rounding * exact.abs().max()
        expected = statistics(logits.double(), target, head.transform)
        for name in ("logp", "entropy", "lse"):
            error = (getattr(stats, name) - getattr(expected, name)).abs().max()
            assert error < 1e-5 * getattr(expected, name).abs().max() + 1e-6
