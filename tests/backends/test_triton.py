"""What only Triton's kernels have: launches of the fused forward, sums of segments, a scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grpo_kernels import linear_logprobs
from grpo_kernels.backends import triton
from grpo_kernels.backends.configs import LinearConfig
from grpo_kernels.backends.triton import linear_launch, linear_stats, scaled_
from grpo_kernels.backends.triton.linear_stats import linear_stats_kernel
from grpo_kernels.backends.triton.segment_sum import segment_sum
from grpo_kernels.head import Head, Transform
from tests.backends.conftest import SMALL, Kernels
from tests.backends.problems import BF16, PLAIN, head_problem, same
from tests.backends.test_linear import check


def heated(rows: int, depth: int, columns: int, device: torch.device) -> tuple:
    """Return a problem whose rows have temperatures of their own."""
    hidden, head, target = head_problem(rows, depth, columns, BF16, device=device)
    each = torch.linspace(0.5, 2.0, rows, device=device)
    return hidden, replace(head, transform=Transform(temperature=each)), target


def test_default_tiles(device) -> None:
    check(Kernels("triton"), *head_problem(130, 72, 4096 + 77, BF16, False, device=device))


def test_long_batches_run_in_chunks(device, small_tiles, monkeypatch) -> None:
    rows = heated(70, 40, 300, device)
    whole = linear_stats(*rows, "fp32", True)
    monkeypatch.setattr(linear_launch, "_PARTIAL_BYTES", 0)
    monkeypatch.setattr(linear_launch, "_CHUNK_ROWS", 32)
    assert same(whole, linear_stats(*rows, "fp32", True))


SAME_BITS = (
    {"descriptors": 1},
    {"group": 5},
    {"flat": 1},
    {"persistent": 1},
    {"persistent": 1, "flat": 1, "group": 5},
)


@pytest.mark.parametrize("change", SAME_BITS)
def test_what_changes_no_bits(change, device) -> None:
    """On a GPU the copy engine exists from Hopper on, and a pipeline may not change a result."""
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no copy engine")
    rows = head_problem(53, 40, 200, BF16, device=device)
    config = SMALL if device.type == "cpu" else LinearConfig(64, 64, 32, 4, 2, 2, 2, 2, 0)
    want, got = (
        linear_launch.linear_stats(*rows, "fp32", False, config=x)
        for x in (config, replace(config, **change))
    )
    assert same(got, want)


@pytest.mark.parametrize("programs", (1, 3, 7, 1000))
@pytest.mark.parametrize("extras", (False, True))
def test_bits_do_not_depend_on_the_number_of_programs(
    programs, extras, device, monkeypatch
) -> None:
    """3 row blocks and 4 splits, the last of a part of its first tile: 12 items."""
    rows = heated(41, 24, 200, device)
    want = linear_launch.linear_stats(*rows, "fp32", extras, config=SMALL)
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return linear_stats_kernel[grid]

    monkeypatch.setattr(linear_launch, "linear_stats_kernel", Kernel())
    monkeypatch.setattr(linear_launch, "_multiprocessors", lambda _: programs)
    persistent = replace(SMALL, persistent=1)
    got = linear_launch.linear_stats(*rows, "fp32", extras, config=persistent)
    assert grids == [(min(programs, 12),)]
    assert same(got, want)


def test_it_is_the_forward_of_the_op(device, monkeypatch) -> None:
    hidden, head, target = head_problem(9, 24, 90, BF16, device=device)
    weight: Tensor = head.weight
    seen, original = [], triton.linear_stats
    monkeypatch.setattr(
        triton, "linear_stats", lambda *arguments: seen.append(1) or original(*arguments)
    )
    linear_logprobs(hidden.float(), weight.float(), target, backend="triton")
    assert not seen
    for precision in ("fp32", "input"):
        linear_logprobs(hidden, weight, target, backend="triton", precision=precision)
    assert len(seen) == 2


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


@pytest.mark.parametrize("shape", [(0,), (1,), (5000,), (130, 77)])
@pytest.mark.parametrize("scale", [1.0, 0.25, -3.0])
def test_scaled_in_place(device: torch.device, shape: tuple[int, ...], scale: float) -> None:
    values = torch.randn(shape, device=device)
    exact = values * scale
    got = scaled_(values, torch.tensor(scale, device=device), torch.float32)
    assert got.data_ptr() == values.data_ptr() and torch.equal(got, exact)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_scaled_to_another_dtype(device: torch.device, scale: float) -> None:
    """Values that fit into 11 bits: the interpreter cuts off what does not."""
    values = torch.randint(-1000, 1000, (3, 700), device=device).float()
    got = scaled_(values.clone(), torch.tensor(scale, device=device), torch.float16)
    assert got.dtype == torch.float16 and torch.equal(got.float(), values * scale)


def test_a_scale_of_one_touches_nothing(device: torch.device) -> None:
    """Not even a NaN changes its bits."""
    bits = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32, device=device)
    scaled_(bits.view(torch.float32), torch.ones((), device=device), torch.float32)
    assert bits.tolist() == [0x7FC00001, 0x3F800000]


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


def test_unsuitable_arguments_are_named(device: torch.device) -> None:
    values, bounds = torch.ones(4, device=device), torch.zeros(2, device=device)
    with pytest.raises(ValueError, match="values: expected"):
        segment_sum(values.double(), bounds.long())
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        segment_sum(values, bounds.int())
