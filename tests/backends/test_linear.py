"""The forwards without a tile of logits against fp64: native ones of every ISA, and Triton's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.base import EXTRAS, RowStats
from grpo_kernels.head import Head, Transform
from grpo_kernels.testing import poisoned_allocations
from tests.backends.conftest import Kernels
from tests.backends.problems import (
    BF16,
    DTYPES,
    FP32,
    PLAIN,
    SPECIAL_ROWS,
    head_problem,
    logits_of,
    same,
    statistics,
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
    return request.param


def check(kernels: Kernels, hidden: Tensor, head: Head, target: Tensor) -> RowStats:
    """Check statistics against fp64: at most twice eager's error, plus roundings of the largest."""
    with poisoned_allocations():
        stats, lean = (
            kernels.backend.linear_stats(hidden, head, target, "fp32", x) for x in (True, False)
        )
    assert all(getattr(lean, name) is None for name in EXTRAS)
    # a GPU spreads these small tiles otherwise over its threads, with extras than without
    assert same(lean, stats) or not (kernels.native or kernels.interpreted)
    exact, eager = (
        statistics(logits_of(hidden, head, wide), target, head.transform)
        for wide in (torch.float64, FP32)
    )
    largest = exact.max_logit.abs().max().clamp(min=10)
    for name, actual in (*stats._asdict().items(), *lean._asdict().items()):
        if name == "is_top1" or actual is None:
            continue
        truth = getattr(exact, name)
        error, allowed = ((x.double() - truth).abs().max() for x in (actual, getattr(eager, name)))
        # tensor cores cut off what they add, so that errors do not cancel
        slack = (3e-7 if kernels.native or kernels.interpreted else 2e-6) * largest
        assert error <= 2 * allowed + slack, f"{name}: error {error:.3e}, eager's {allowed:.3e}"
    assert stats.lse.dtype == torch.float64 and (stats.entropy >= 0).all()
    logits = logits_of(hidden, head, torch.float64)
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
    exact = statistics(logits_of(hidden, head, torch.float64), target, PLAIN).logprobs
    stats = check(kernels, hidden, head, target)
    if kind == "nearly certain" and kernels.native:  # no digits are lost beside the 1 of the target
        torch.testing.assert_close(stats.logprobs.double(), exact, rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("transform", [PLAIN, Transform(softcap=3.0)])
def test_top1_is_the_first_of_equal_maxima(kernels, transform):
    columns = kernels.size(5000, 300)
    first, second, last = columns // 2, columns // 2 + 1, columns - 20
    weight = torch.zeros(columns, 1, dtype=BF16, device=kernels.device)
    weight[[first, second, last]] = 1.0
    target = torch.tensor([first, second, last, 0], device=kernels.device)
    hidden = torch.ones(4, 1, dtype=BF16, device=kernels.device)
    stats = kernels.backend.linear_stats(
        hidden, Head(weight, None, transform), target, "fp32", True
    )
    assert stats.is_top1.tolist() == [True, False, False, False]
