"""What only Triton's kernels have: launches of the fused forward, sums of segments, a scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from grpo_kernels.backends.gpu_tiles import LinearConfig
from grpo_kernels.backends.triton import linear_stats, scaled, segment_sum
from grpo_kernels.head import Head
from tests.backends.conftest import SMALL, Kernels
from tests.backends.problems import BF16, FP16, FP32, PLAIN, head_problem, same
from tests.backends.test_linear import check


def test_default_tiles(device) -> None:
    check(Kernels("triton"), *head_problem(130, 72, 1024 + 77, BF16, False, device=device))


@pytest.mark.parametrize("change", [{"descriptors": 1}, {"group": 5}])
def test_what_changes_no_bits(change, device) -> None:
    """On a GPU the copy engine exists from Hopper on, and a pipeline may not change a result."""
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no copy engine")
    rows = head_problem(37, 40, 150, BF16, device=device)
    config = SMALL if device.type == "cpu" else LinearConfig(64, 64, 32, 4, 2, 2, 2, 2, 0)
    want, got = (
        linear_stats(*rows, "fp32", False, config=x) for x in (config, replace(config, **change))
    )
    assert same(got, want)


@pytest.mark.gpu
def test_extra_memory_is_small() -> None:
    rows = head_problem(4096, 256, 32000, BF16, False, device="cuda")
    linear_stats(*rows, "fp32", False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_stats(*rows, "fp32", False)
    assert torch.cuda.max_memory_allocated() - before < 4 << 20


@pytest.mark.gpu  # the interpreter copies whole storages
def test_offsets_beyond_32_bits() -> None:
    hidden, head, target = head_problem(40, 64, 300, BF16, False, device="cuda")
    apart = torch.empty(300, 2**31 // 256, dtype=BF16, device="cuda")[:, :64]
    check(Kernels("triton"), hidden, Head(apart.copy_(head.weight), None, PLAIN), target)


@pytest.mark.parametrize(
    "lengths", ([], [0], [1], [0, 3, 0, 0, 7, 1], [5, 70000, 0, 1], [1024, 1023, 1025])
)
def test_segment_sum(lengths: list[int], device: torch.device) -> None:
    """What lies outside of the segments is not read."""
    values = torch.randn(sum(lengths) + 5, device=device)
    bounds = torch.tensor([2, *lengths], device=device).cumsum(0)
    want = [part.double().sum().item() for part in values[2:-3].split(lengths)]
    values[:2] = values[-3:] = torch.nan
    got = segment_sum(values, bounds)
    assert got.shape == (len(lengths),) and got.dtype == torch.float32
    assert got.tolist() == pytest.approx(want, rel=1e-6)


def test_more_segments_than_the_second_axis_of_a_grid(device: torch.device) -> None:
    """They are on the first."""
    segments = 70_000 if device.type == "cuda" else 300
    values = torch.randn(segments, device=device)
    assert torch.equal(segment_sum(values, torch.arange(segments + 1, device=device)), values)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of inf and NaN
@pytest.mark.parametrize(
    "shape,scale",
    [
        *((shape, 0.3) for shape in [(0, 5), (1,), (2, 1024), (61, 101)]),
        *(((3, 683), scale) for scale in [-1e-3, 0.0, 1e30, torch.inf, torch.nan]),
    ],
)
@pytest.mark.parametrize("dtypes", [(FP32, BF16), (FP32, FP16), (BF16, BF16), (FP32, FP32)])
def test_scaled(
    dtypes: tuple[torch.dtype, torch.dtype],
    shape: tuple[int, ...],
    scale: float,
    device: torch.device,
) -> None:
    """The bits are those of one rounding of an fp32 product."""
    before, after = dtypes
    gradient = torch.randn(shape, device=device).mul_(100).to(before)
    for place, value in enumerate((torch.inf, -torch.inf, torch.nan)):
        gradient.view(-1)[7 + place : 8 + place] = value
    factor = torch.tensor(scale, device=device)
    want = gradient.float().mul(factor).to(after)
    got = scaled(gradient, factor, after)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert (got.data_ptr() == gradient.data_ptr()) == (before == after) or not got.numel()


def test_scaled_rounds_ties_to_even(device: torch.device) -> None:
    """Of bf16 neighbors, and with a scale that is no bf16 number."""
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8], device=device)
    one = torch.ones((), device=device)
    assert scaled(ties, one, BF16).tolist() == [1.0, 1 + 2**-6, -1.0]
    assert scaled(torch.ones(1, dtype=BF16, device=device), ties[1] - 2**-9, BF16) == 1 + 2**-7


@pytest.mark.gpu  # 4 GiB
def test_scaled_offsets_beyond_32_bits() -> None:
    gradient = torch.ones(2**31 + 5, dtype=BF16, device="cuda")
    got = scaled(gradient, torch.tensor(3.0, device="cuda"), BF16)
    assert (got[:9] == 3).all() and (got[-9:] == 3).all()
