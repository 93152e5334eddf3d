"""The GEMM that stores exponentials: statistics and gradients of log-probabilities against fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton import knobs

from grpo_kernels.backends import StatsGrad, TileGradient
from grpo_kernels.backends.base import RowStats
from grpo_kernels.backends.gpu_tiles import LinearConfig
from grpo_kernels.backends.triton import linear_logp_gradient, linear_stats
from grpo_kernels.head import Head, Transform
from grpo_kernels.testing import poisoned_allocations
from tests.backends.conftest import SMALL
from tests.backends.problems import (
    BF16,
    PLAIN,
    dlogits,
    head_problem,
    logits_of,
    statistics,
    transform_of,
)

# the interpreter computes with numpy, which warns where a GPU gives inf or NaN without a word
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered.*:RuntimeWarning")
HAS_COPY_ENGINE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
DESCRIPTORS = dataclasses.replace(SMALL, descriptors=1)
SHAPES = [(1, 32, 17), (5, 8, 129), (35, 24, 150), (17, 33, 97), (16, 16, 64)]


def run(
    hidden: Tensor, head: Head, target: Tensor, config: LinearConfig | None = SMALL
) -> tuple[RowStats, TileGradient]:
    """Return what the kernels leave in poisoned memory, padding included."""
    pitch = -(-len(head.weight) // 64) * 64
    with poisoned_allocations():
        out = hidden.new_empty(len(hidden), pitch)[:, : len(head.weight)]
        out.fill_(torch.nan)
        return linear_logp_gradient(hidden, head, target, out, config)


def product(gradient: TileGradient) -> Tensor:
    """Return (T, V) gradients of log-probabilities by the logits."""
    assert gradient.row_scale is not None
    return gradient.dlogits.double() * gradient.row_scale.double()[:, None]


def check(
    hidden: Tensor, head: Head, target: Tensor, config: LinearConfig | None = SMALL
) -> tuple[RowStats, TileGradient]:
    stats, gradient = run(hidden, head, target, config)
    wide = logits_of(hidden, head, torch.float64)
    exact = statistics(wide, target, head.transform)
    eager = statistics(logits_of(hidden, head, torch.float32), target, head.transform)
    largest = wide.abs().max().clamp(min=10)
    for name in ("logprobs", "entropy", "lse"):
        truth, of_eager = getattr(exact, name), getattr(eager, name)
        error = (getattr(stats, name).double() - truth).abs().max()
        allowed = 2 * (of_eager.double() - truth).abs().max() + 1e-6 * largest
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"
    truth = dlogits(wide, target, head.transform, StatsGrad(torch.ones_like(exact.logprobs)))
    error = product(gradient) - truth
    # one rounding to bf16, and what the errors of logits do to exponentials
    assert (error.abs() <= (1.001 * 2.0**-8 + 1e-6 * largest) * truth.abs() + 1e-12).all(), (
        error.abs().max()
    )
    return stats, gradient


@pytest.mark.parametrize("config", [SMALL, DESCRIPTORS], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(
    device: torch.device, shape: tuple[int, int, int], config: LinearConfig
) -> None:
    if config.descriptors and shape[1] % 8:
        pytest.skip("rows start at multiples of 16 bytes where the copy engine brings them")
    if config.descriptors and not (knobs.runtime.interpret or HAS_COPY_ENGINE):
        pytest.skip("this device has no copy engine")
    check(*head_problem(*shape, BF16, bias=False, device=device), config)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="such tiles take a GPU")
@pytest.mark.parametrize("shape", [(300, 512, 5008), (129, 520, 5003), (1, 72, 1000)], ids=str)
def test_the_tile_of_the_table(device: torch.device, shape: tuple[int, int, int]) -> None:
    """Targets' logits come from another product: E is exactly 1 there only if it rounds alike."""
    hidden, head, target = head_problem(*shape, BF16, bias=False, device=device)
    check(hidden, head, target, None)
    certain = Head((40 * head.weight.float()).to(BF16), None, PLAIN)
    exact = statistics(logits_of(hidden, certain, torch.float64), target, PLAIN).logprobs
    error = (run(hidden, certain, target, None)[0].logprobs.double() - exact).abs()
    clear = exact > -1e-3
    assert clear.any() and (error[clear] <= 2.5e-7 - 1e-3 * exact[clear]).all()


@pytest.mark.parametrize("name", ["temperature", "scale", "per row"])
def test_transforms(device: torch.device, name: str) -> None:
    hidden, head, target = head_problem(19, 24, 131, BF16, bias=False, device=device)
    check(hidden, dataclasses.replace(head, transform=transform_of(name, 19, device)), target)


def picked(logits: Tensor, target: Tensor, device: torch.device) -> tuple[Tensor, Head, Tensor]:
    """Return hidden states that each pick a row of logits out of the weight."""
    weight = logits.t().contiguous().to(device, BF16)
    hidden = torch.eye(len(logits), device=device).to(BF16)
    return hidden, Head(weight, None, PLAIN), target.to(device)


@pytest.mark.parametrize("nats", [-40.0, -60.0, -84.0, -100.0, -300.0])
def test_targets_far_from_the_rest(device: torch.device, nats: float) -> None:
    """Below -55 the gradient is formed again, below -84 the sums as well; neighbors are not."""
    logits, target = torch.randn(21, 150), torch.randint(150, (21,))
    plain, _ = run(*picked(logits, target, device))
    logits[4, target[4]] = logits[4].amax() + nats
    stats, gradient = check(*picked(logits, target, device))
    others = torch.arange(21, device=device) != 4
    assert torch.equal(stats.logprobs[others], plain.logprobs[others])
    assert torch.isfinite(gradient.dlogits).all()
    assert gradient.dlogits.double().abs().max() < 2.0**81


@pytest.mark.parametrize("nats", [10.0, 16.6, 60.0])
def test_certain_targets(device: torch.device, nats: float) -> None:
    """The rivals keep their digits, and 1 - p those of fp32 log-probabilities."""
    logits, target = torch.randn(21, 150), torch.randint(150, (21,))
    each = torch.arange(21)
    logits[each, target] = logits.amax(1) + nats
    hidden, head, target = picked(logits, target, device)
    stats, gradient = run(hidden, head, target)
    wide = logits_of(hidden, head, torch.float64)
    exact = dlogits(wide, target, PLAIN, StatsGrad(torch.ones_like(stats.logprobs)))
    at_target = torch.nn.functional.one_hot(target, 150)
    allowed = 1.001 * 2.0**-8 * exact.abs() + 1e-12 + 2.5e-7 * at_target
    assert ((product(gradient) - exact).abs() <= allowed).all()


def test_many_far_targets(device: torch.device) -> None:
    logits, target = 30 * torch.randn(40, 150), torch.randint(150, (40,))
    check(*picked(logits, target, device))


@pytest.mark.parametrize("size", [150.0, -150.0, 1e4])
def test_large_logits(device: torch.device, size: float) -> None:
    """An offset that all logits of a row have costs no digits."""
    logits, target = torch.randn(9, 150).bfloat16().float(), torch.randint(150, (9,))
    rows = torch.cat([torch.eye(9), torch.full((9, 1), 1.0)], 1)
    weight = torch.cat([logits.t(), torch.full((150, 1), size).bfloat16().float()], 1)
    hidden = rows.to(device, BF16)
    check(hidden, Head(weight.to(device, BF16), None, PLAIN), target.to(device))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite(device: torch.device, value: float) -> None:
    """Their gradient is zeros times NaN, which adds nothing without a weight."""
    hidden, head, target = head_problem(20, 24, 150, BF16, bias=False, device=device)
    plain, exact = run(hidden, head, target)
    hidden[3] = value
    stats, gradient = run(hidden, head, target)
    others = torch.arange(20, device=device) != 3
    assert torch.equal(stats.logprobs[others], plain.logprobs[others])
    assert torch.equal(gradient.dlogits[others], exact.dlogits[others])
    assert stats.logprobs[3].isnan() and gradient.row_scale is not None
    assert gradient.row_scale[3].isnan() and not gradient.dlogits[3].any()


def test_a_column_of_minus_infinity(device: torch.device) -> None:
    """Its probability is 0, and the entropy is that of the others."""
    logits, target = torch.randn(6, 150), torch.randint(1, 150, (6,))
    hidden, head, target = picked(logits, target, device)
    head.weight[0] = -torch.inf
    hidden = torch.ones(6, 6, device=device, dtype=BF16)
    stats, gradient = run(hidden, head, target)
    exact = statistics(logits_of(hidden, head, torch.float64), target, PLAIN)
    torch.testing.assert_close(stats.logprobs.double(), exact.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy.double(), exact.entropy, rtol=1e-5, atol=1e-5)
    assert not gradient.dlogits[:, 0].any() and torch.isfinite(product(gradient)).all()


def test_no_rows(device: torch.device) -> None:
    hidden, head, target = head_problem(1, 24, 150, BF16, bias=False, device=device)
    stats, gradient = run(hidden[:0], head, target[:0])
    assert stats.logprobs.shape == (0,) and gradient.dlogits.shape == (0, 150)


def test_a_rows_bits_depend_on_it_alone(device: torch.device) -> None:
    """Also next to a row whose sums overflow."""
    hidden, head, target = head_problem(40, 24, 150, BF16, bias=False, device=device)
    stats, gradient = run(hidden, head, target)
    some, of_some = run(hidden[7:20], head, target[7:20])
    for actual, expected in ((some.logprobs, stats.logprobs), (some.entropy, stats.entropy)):
        assert torch.equal(actual, expected[7:20])
    assert torch.equal(of_some.dlogits, gradient.dlogits[7:20])


@pytest.mark.gpu  # 4 GiB
def test_offsets_beyond_32_bits() -> None:
    """A vocabulary of 262,144, and more than 2**31 exponentials: the last rows are as alone."""
    rows, columns, last = 8192 + 130, 262_144, slice(8192 - 70, None)
    hidden, weight = (torch.randn(n, 64, dtype=BF16, device="cuda") for n in (rows, columns))
    head, target = Head(weight, None, PLAIN), torch.randint(columns, (rows,), device="cuda")
    stats, gradient = run(hidden, head, target, config=None)
    some, of_some = run(hidden[last], head, target[last], config=None)
    assert torch.equal(some.logprobs, stats.logprobs[last])
    assert torch.equal(of_some.dlogits, gradient.dlogits[last])


def test_statistics_are_those_without_a_gradient(device: torch.device) -> None:
    hidden, head, target = head_problem(30, 24, 150, BF16, bias=False, device=device)
    head = dataclasses.replace(head, transform=Transform(temperature=0.7))
    stats, _ = run(hidden, head, target)
    plain = linear_stats(hidden, head, target, "fp32", False, SMALL)
    torch.testing.assert_close(stats, plain, rtol=2e-6, atol=2e-6)
