"""What only Triton's fused forward has: its launches, their memory, and where it is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grpo_kernels import linear_logprobs
from grpo_kernels.backends import triton
from grpo_kernels.backends.configs import LinearConfig
from grpo_kernels.backends.triton import linear_launch
from grpo_kernels.backends.triton.linear_stats import linear_stats_kernel
from grpo_kernels.head import Head, Transform
from tests.backends.conftest import SMALL, LinearTarget
from tests.backends.test_linear import check
from tests.support.linear_problems import BF16, problem, same


@pytest.fixture
def fused(device: torch.device) -> LinearTarget:
    return LinearTarget(linear_launch.linear_stats, device)


def test_default_tiles(fused) -> None:
    check(fused, *problem(130, 72, 4096 + 77, BF16, False, device=fused.device))


def test_long_batches_run_in_chunks(fused, small_tiles, monkeypatch) -> None:
    hidden, head, target = problem(70, 40, 300, BF16, device=fused.device)
    temperature = torch.linspace(0.5, 2.0, 70, device=fused.device)
    head = replace(head, transform=Transform(temperature=temperature))
    whole = fused(hidden, head, target)
    monkeypatch.setattr(linear_launch, "_PARTIAL_BYTES", 0)
    monkeypatch.setattr(linear_launch, "_CHUNK_ROWS", 32)
    assert same(whole, fused(hidden, head, target))


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
    rows = problem(53, 40, 200, BF16, device=device)
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
    hidden, head, target = problem(41, 24, 200, BF16, device=device)
    temperature = torch.linspace(0.5, 2.0, 41, device=device)
    head = replace(head, transform=Transform(temperature=temperature))
    want = linear_launch.linear_stats(hidden, head, target, "fp32", extras, config=SMALL)
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return linear_stats_kernel[grid]

    monkeypatch.setattr(linear_launch, "linear_stats_kernel", Kernel())
    monkeypatch.setattr(linear_launch, "_multiprocessors", lambda _: programs)
    persistent = replace(SMALL, persistent=1)
    got = linear_launch.linear_stats(hidden, head, target, "fp32", extras, config=persistent)
    assert grids == [(min(programs, 12),)]
    assert same(got, want)


def test_rows_that_begin_at_odd_places(fused, small_tiles) -> None:
    hidden, head, target = problem(20, 24, 90, BF16, False, device=fused.device)
    odd = torch.empty(20 * 24 + 1, dtype=BF16, device=fused.device)[1:].view(20, 24).copy_(hidden)
    assert same(fused(hidden, head, target), fused(odd, head, target))


def test_it_is_the_forward_of_the_op(device, monkeypatch) -> None:
    hidden, head, target = problem(9, 24, 90, BF16, device=device)
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


def test_extra_memory_is_small(fused) -> None:
    if fused.device.type != "cuda":
        pytest.skip("counts the CUDA allocator's bytes")
    rows = problem(4096, 256, 32000, BF16, False, device=fused.device)
    fused(*rows, extras=False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused(*rows, extras=False)
    assert torch.cuda.max_memory_allocated() - before < 4 << 20


def test_offsets_beyond_32_bits(fused) -> None:
    if fused.device.type == "cpu":
        pytest.skip("the interpreter copies whole storages; needs 5 GB on a GPU")
    hidden, head, target = problem(40, 64, 300, BF16, False, device=fused.device)
    apart = torch.empty(300, 2**31 // 256, dtype=BF16, device=fused.device)[:, :64]
    check(fused, hidden, Head(apart.copy_(head.weight), None, Transform()), target)
