"""The native forward without a tile of logits against fp64, in every instruction set here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.base import RowStats
from grpo_kernels.backends.cpu.linear import NativeLinear
from grpo_kernels.backends.registry import BACKENDS
from grpo_kernels.head import Head, Transform
from tests.backends.linear_problems import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    ISAS,
    logits_of,
    problem,
    same,
    statistics,
)

SHAPES = [(1, 1, 1), (1, 33, 17), (5, 2, 129), (17, 64, 1024), (49, 100, 1025), (33, 300, 2500)]
TRANSFORMS = {
    "temperature": Transform(temperature=0.7),
    "scale": Transform(logit_scale=0.25, temperature=1.3),
    "softcap": Transform(softcap=5.0),
    "all": Transform(logit_scale=1.5, softcap=4.0, temperature=0.6),
}


@pytest.fixture(params=ISAS)
def linear(request: pytest.FixtureRequest) -> NativeLinear:
    return NativeLinear(ISAS.index(request.param))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def check(
    linear: NativeLinear, hidden: Tensor, head: Head, target: Tensor, precision: str = "fp32"
) -> RowStats:
    """Check statistics against fp64: at most twice eager's error, plus roundings of the largest."""
    stats = linear(hidden, head, target, precision, extras=True)
    exact, eager = (
        statistics(logits_of(hidden, head, precision, wide), target, head.transform)
        for wide in (torch.float64, FP32)
    )
    for name, actual in stats._asdict().items():
        if name == "is_top1" or actual is None:
            continue
        truth = getattr(exact, name)
        error, allowed = ((x.double() - truth).abs().max() for x in (actual, getattr(eager, name)))
        slack = 4 * torch.finfo(FP32).eps * exact.max_logit.abs().max().clamp(min=1)
        assert error <= 2 * allowed + slack, f"{name}: error {error:.3e}, eager's {allowed:.3e}"
    assert stats.lse.dtype == torch.float64 and (stats.entropy >= 0).all()
    return stats


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(linear, shape, dtype):
    hidden, head, target = problem(*shape, dtype)
    stats = check(linear, hidden, head, target)
    logits = logits_of(hidden, head, "fp32", torch.float64)
    two = logits.topk(min(2, shape[2])).values
    clear = two[:, 0] - two[:, -1] > 1e-4 if shape[2] > 1 else torch.ones(shape[0], dtype=bool)
    assert torch.equal(stats.is_top1[clear], (logits.argmax(-1) == target)[clear])
    check(linear, hidden, replace(head, bias=None), target)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_transforms(linear, transform, dtype):
    hidden, head, target = problem(9, 40, 1500, dtype)
    check(linear, hidden, replace(head, transform=transform), target)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_temperature_per_row(linear, softcap):
    temperature = torch.tensor([0.1, 0.5, 1.0, 1.5, 3.0, 100.0])
    hidden, head, target = problem(6, 40, 1500, FP32)
    check(linear, hidden, replace(head, transform=Transform(1.0, softcap, temperature)), target)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_input_precision_rounds_product_and_sum(linear, dtype, bias):
    """Products are exact here, so that every order of summation rounds to the same logit."""
    hidden, head, target = problem(9, 40, 1500, dtype, bias)
    hidden, weight = ((32 * x.float()).round().div(32).to(dtype) for x in (hidden, head.weight))
    head = replace(head, weight=weight)
    check(linear, hidden, head, target, "input")
    exact = linear(hidden, head, target, "fp32", extras=False)
    assert not same(exact, linear(hidden, head, target, "input", extras=False))


@pytest.mark.parametrize("tokens", [511, 513, 770])
def test_several_chunks(linear, tokens):
    for dtype in (FP32, BF16):
        check(linear, *problem(tokens, 40, 300, dtype))


def test_depth_beyond_one_block(linear):
    for dtype in (FP32, BF16):
        check(linear, *problem(3, 1111, 200, dtype))


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
def test_size_of_logits(linear, size):
    for dtype in (FP32, BF16):
        check(linear, *problem(7, 64, 1100, dtype, size=size))


def test_rising_logits_move_the_maximum_in_every_block(linear):
    weight = torch.linspace(-300, 40, 5011)[:, None]
    head = Head(weight, None, Transform())
    check(linear, torch.ones(2, 1), head, torch.tensor([5010, 4000]))
    check(linear, torch.tensor([[1.0], [-1.0]]), head, torch.tensor([5010, 0]))


@pytest.mark.parametrize("lead", [12.0, 16.6, 20.0, 60.0, 200.0])
def test_probability_near_one(linear, lead):
    """No digits are lost beside the 1 of the largest term."""
    hidden, weight, target = torch.ones(4, 1), torch.randn(1003, 1), torch.full((4,), 700)
    weight[700] = weight.max() + lead
    stats = linear(hidden, Head(weight, None, Transform()), target, "fp32", extras=False)
    exact = weight[:, 0].double().log_softmax(0)[700]
    torch.testing.assert_close(stats.logp.double(), exact.expand(4), rtol=1e-6, atol=1e-15)


def test_top1_is_the_first_of_equal_maxima(linear):
    weight = torch.zeros(5000, 1)
    weight[[2100, 2101, 4100]] = 1.0
    target = torch.tensor([2100, 2101, 4100, 0])
    for transform in (Transform(), Transform(softcap=3.0)):
        head = Head(weight, None, transform)
        is_top1 = linear(torch.ones(4, 1), head, target, "fp32", extras=True).is_top1
        assert is_top1.tolist() == [True, False, False, False]


def test_extras_only_when_asked(linear):
    hidden, head, target = problem(5, 40, 1500, BF16)
    stats = linear(hidden, head, target, "fp32", extras=False)
    assert stats.is_top1 is None and stats.sum_sq_probs is None
    assert stats.max_logit is None and stats.min_logit is None
    assert same(stats, linear(hidden, head, target, "fp32", extras=True))


def test_no_tokens(linear):
    hidden, head, target = problem(0, 8, 30, BF16)
    assert [x.shape for x in linear(hidden, head, target, "fp32", True)[:7]] == [(0,)] * 7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_bias(linear, dtype):
    hidden, head, target = problem(4, 40, 1500, dtype)
    bias = head.bias.clone()
    bias[:1100] = -math.inf
    target[:] = torch.tensor([0, 1400, 1400, 1499])
    stats = linear(hidden, replace(head, bias=bias), target, "fp32", extras=True)
    rest = replace(head, weight=head.weight[1100:], bias=bias[1100:])
    exact = check(linear, hidden, rest, (target - 1100).clamp(min=0))
    assert stats.logp[0] == -math.inf and (stats.min_logit == -math.inf).all()
    for name in ("entropy", "lse", "max_logit", "sum_sq_probs"):
        torch.testing.assert_close(getattr(stats, name), getattr(exact, name))
    torch.testing.assert_close(stats.logp[1:], exact.logp[1:])


def test_registered():
    hidden, head, _ = problem(2, 4, 5, FP32)
    assert BACKENDS["cpu"].linear_stats(hidden.dtype, head, "input") is not None
    assert BACKENDS["chunked"].linear_stats(hidden.dtype, head, "fp32") is None
