"""The forwards without a tile of logits against fp64: native ones of every ISA, and Triton's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.base import EXTRAS, RowStats
from grpo_kernels.head import Head, Transform
from grpo_kernels.testing import poisoned_allocations
from tests.backends.conftest import LinearTarget
from tests.support.linear_problems import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    logits_of,
    problem,
    same,
    statistics,
)

# the interpreter computes with numpy, which warns where a GPU gives inf or NaN without a word
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

SHAPES = [(1, 33, 17), (5, 2, 129), (17, 64, 1024), (49, 100, 1025), (33, 300, 2500)]
TRANSFORMS = {
    "temperature": Transform(temperature=0.7),
    "scale": Transform(logit_scale=0.25, temperature=1.3),
    "softcap": Transform(softcap=5.0),
    "all": Transform(logit_scale=1.5, softcap=4.0, temperature=0.6),
}


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest, linear: LinearTarget) -> torch.dtype:
    if request.param == FP32 and not linear.native:
        pytest.skip("Triton's forward is for 16 bits")
    if request.param == FP16 and linear.interpreted and request.function is not test_transforms:
        pytest.skip("one dtype is enough for the slow interpreter")
    return request.param


def check(
    linear: LinearTarget, hidden: Tensor, head: Head, target: Tensor, precision: str = "fp32"
) -> RowStats:
    """Check statistics against fp64: at most twice eager's error, plus roundings of the largest."""
    with poisoned_allocations():
        stats = linear(hidden, head, target, precision)
        lean = linear(hidden, head, target, precision, extras=False)
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
    return stats


def posed(
    linear: LinearTarget, tokens: int, depth: int, columns: int, *options: Any, **named: Any
) -> tuple[Tensor, Head, Tensor]:
    """Return ``problem``; the interpreter, which is slow, gets a small one."""
    if linear.interpreted:
        tokens, depth, columns = min(tokens, 35), min(depth, 24), min(columns, 150)
    return problem(tokens, depth, columns, *options, **named, device=linear.device)


def assert_top1(stats: RowStats, hidden: Tensor, head: Head, target: Tensor) -> None:
    logits = logits_of(hidden, head, "fp32", torch.float64)
    first, second = logits.topk(min(2, logits.shape[1])).values[:, [0, -1]].unbind(-1)
    clear = (first - second > 1e-4) | (logits.shape[1] == 1)
    assert torch.equal(stats.is_top1[clear], (logits.argmax(-1) == target)[clear])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_matches_fp64(linear, shape, dtype, bias):
    if linear.interpreted and shape[2] > 150:
        pytest.skip("as test_transforms")
    hidden, head, target = posed(linear, *shape, dtype, bias)
    assert_top1(check(linear, hidden, head, target), hidden, head, target)


@pytest.mark.parametrize("tokens", [1, 16, 33])
@pytest.mark.parametrize("columns", [1, 17, 64, 129])
@pytest.mark.parametrize("depth", [1, 5, 32])
def test_odd_shapes(linear, tokens, columns, depth):
    hidden, head, target = posed(linear, tokens, depth, columns, BF16, False)
    assert_top1(check(linear, hidden, head, target), hidden, head, target)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("bias", [False, True])
def test_transforms(linear, transform, dtype, bias):
    hidden, head, target = posed(linear, 53, 40, 200, dtype, bias)
    check(linear, hidden, replace(head, transform=transform), target)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_temperature_per_row(linear, dtype, softcap):
    temperature = torch.tensor([0.1, 0.5, 1.0, 1.5, 3.0, 100.0], device=linear.device)
    hidden, head, target = posed(linear, 6, 40, 1500, dtype)
    check(linear, hidden, replace(head, transform=Transform(1.0, softcap, temperature)), target)


@pytest.mark.parametrize("bias", [False, True])
def test_input_precision_rounds_product_and_sum(linear, dtype, bias):
    """Products are exact here, so that every order of summation rounds to the same logit."""
    if dtype == FP32:
        pytest.skip("nothing is rounded")
    hidden, head, target = posed(linear, 15, 40, 500, dtype, bias)
    hidden, weight = ((32 * x.float()).round().div(32).to(dtype) for x in (hidden, head.weight))
    for transform in (Transform(), TRANSFORMS["scale"]):
        head = replace(head, weight=weight, transform=transform)
        check(linear, hidden, head, target, "input")
        exact = linear(hidden, head, target, extras=False)
        assert not same(exact, linear(hidden, head, target, "input", extras=False))


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
def test_size_of_logits(linear, dtype, size):
    if dtype == FP16 and size > 100:
        pytest.skip("beyond fp16")
    check(linear, *posed(linear, 7, 64, 1100, dtype, size=size))


@pytest.mark.parametrize("offset", [-3e4, 3e4])
def test_offset_logits(linear, dtype, offset):
    hidden, head, target = posed(linear, 20, 24, 90, dtype)
    check(linear, hidden, replace(head, bias=torch.full_like(head.bias, offset)), target)


def test_rising_logits_move_the_maximum_in_every_block(linear):
    last = 300 if linear.interpreted else 5010
    weight = torch.linspace(-300, 40, last + 1, device=linear.device)[:, None].bfloat16()
    head, one = Head(weight, None, Transform()), torch.ones(2, 1, device=linear.device).bfloat16()
    for hidden, target in (
        (one, [last, last - 10]),
        (one * torch.tensor([[1.0], [-1.0]]).to(one), [last, 0]),
    ):
        check(linear, hidden, head, torch.tensor(target, device=linear.device))


@pytest.mark.parametrize("lead", [12.0, 16.6, 20.0, 60.0, 200.0])
def test_probability_near_one(linear, dtype, lead):
    """The native ones lose no digits beside the 1 of the largest term."""
    columns = 150 if linear.interpreted else 1003
    weight, place = torch.randn(columns, 1), columns - 3
    weight[place] = weight.max() + lead
    weight = weight.to(linear.device, dtype)
    hidden = torch.ones(4, 1, dtype=dtype, device=linear.device)
    target = torch.full((4,), place, device=linear.device)
    stats = check(linear, hidden, Head(weight, None, Transform()), target)
    if linear.native:
        exact = weight[:, 0].double().log_softmax(0)[place]
        torch.testing.assert_close(stats.logp.double(), exact.expand(4), rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("transform", [Transform(), Transform(softcap=3.0)])
def test_top1_is_the_first_of_equal_maxima(linear, transform):
    columns = 300 if linear.interpreted else 5000
    first, second, last = columns // 2, columns // 2 + 1, columns - 20
    weight = torch.zeros(columns, 1, dtype=BF16, device=linear.device)
    weight[[first, second, last]] = 1.0
    target = torch.tensor([first, second, last, 0], device=linear.device)
    hidden = torch.ones(4, 1, dtype=BF16, device=linear.device)
    stats = linear(hidden, Head(weight, None, transform), target)
    assert stats.is_top1.tolist() == [True, False, False, False]


def test_no_tokens(linear, dtype):
    hidden, head, target = posed(linear, 0, 8, 30, dtype)
    assert [x.shape for x in linear(hidden, head, target)[:7]] == [(0,)] * 7


def test_infinite_bias(linear, dtype):
    hidden, head, target = posed(linear, 4, 40, 1500, dtype)
    bias = head.bias.clone()
    columns = len(bias)
    lost = columns * 2 // 3
    bias[:lost] = -math.inf
    target[:] = torch.tensor([0, columns - 9, columns - 9, columns - 1])
    stats = linear(hidden, replace(head, bias=bias), target)
    rest = replace(head, weight=head.weight[lost:], bias=bias[lost:])
    exact = check(linear, hidden, rest, (target - lost).clamp(min=0))
    assert stats.logp[0] == -math.inf and (stats.min_logit == -math.inf).all()
    for name in ("entropy", "lse", "max_logit", "sum_sq_probs"):
        torch.testing.assert_close(getattr(stats, name), getattr(exact, name))
    torch.testing.assert_close(stats.logp[1:], exact.logp[1:])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_nan_stays_in_its_row(linear, dtype, bad, softcap):
    if bad == math.inf and softcap:
        pytest.skip("a softcap makes it finite")
    hidden, head, target = posed(linear, 33, 40, 300, dtype)
    head = replace(head, transform=Transform(softcap=softcap))
    clean = linear(hidden, head, target)
    hidden[5, -1] = bad
    stats = linear(hidden, head, target)
    others = torch.arange(33, device=linear.device) != 5
    for before, after in zip(clean[:7], stats[:7], strict=True):
        assert torch.equal(before[others], after[others])
        assert after.dtype == torch.bool or after[5].isnan()


def test_strides(linear, dtype):
    hidden, head, target = posed(linear, 19, 24, 1100, dtype)
    expected = linear(hidden, head, target)

    def embedded(x: Tensor) -> Tensor:
        """Copy it to between NaNs, in rows that start at odd places."""
        storage = x.new_full((2 * x.shape[0], x.shape[1] + 5), math.nan)
        return storage[::2, 3 : 3 + x.shape[1]].copy_(x)

    transposed = head.weight.t().contiguous().t()
    assert same(expected, linear(embedded(hidden), head, target))
    assert same(expected, linear(hidden, replace(head, weight=transposed), target))
    strided = replace(head, weight=embedded(head.weight), bias=head.bias.repeat_interleave(2)[::2])
    got = check(linear, embedded(hidden), strided, target)
    assert not linear.native or same(expected, got)
    check(linear, embedded(hidden)[:1], strided, target[:1])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("precision", ["fp32", "input"])
def test_same_bits_for_any_threads_and_batch(linear, dtype, precision):
    tokens, depth, columns = (600, 70, 3000) if linear.native else (70, 24, 150)
    hidden, head, target = problem(tokens, depth, columns, dtype, device=linear.device)
    temperature = torch.rand(tokens, device=linear.device) + 0.5
    head = replace(head, transform=Transform(temperature=temperature))

    def run(rows: slice | Tensor, threads: int) -> RowStats:
        torch.set_num_threads(threads)
        return linear(hidden[rows], head.rows(rows), target[rows], precision)

    whole = run(slice(None), 1)
    for threads in (1, 2, 3) if linear.native else ():
        assert same(whole, run(slice(None), threads))
    order = torch.randperm(tokens, device=linear.device)
    more = torch.arange(tokens + 10, device=linear.device) % tokens
    ends = (slice(0, 1), slice(3, 4), slice(tokens - 1, tokens), slice(1, tokens - 20))
    for rows in (order, order[:50], more, *ends):
        assert same(whole.rows(rows), run(rows, 2))
