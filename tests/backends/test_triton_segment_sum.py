"""Triton reductions over packed tokens."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from grpo_kernels.backends.triton.segment_sum import segment_sum


@pytest.mark.parametrize(
    "lengths", ([], [0], [1], [0, 3, 0, 0, 7, 1], [5, 70000, 0, 1], [1024, 1023, 1025])
)
def test_segment_sum(lengths: list[int], device: torch.device) -> None:
    values = torch.randn(sum(lengths), device=device)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    want = [part.double().sum().item() for part in values.split(lengths)]
    got = segment_sum(values, bounds)
    assert got.shape == (len(lengths),) and got.dtype == torch.float32
    assert got.tolist() == pytest.approx(want, rel=1e-6)


def test_more_segments_than_the_second_axis_of_a_grid(device: torch.device) -> None:
    """They are on the first."""
    segments = 70_000 if device.type == "cuda" else 300
    values = torch.randn(segments, device=device)
    assert torch.equal(segment_sum(values, torch.arange(segments + 1, device=device)), values)


def test_segments_outside_of_the_bounds_are_not_read(device: torch.device) -> None:
    values = torch.full((10,), float("nan"), device=device)
    values[2:8] = 1.0
    assert segment_sum(values, torch.tensor([2, 4, 8], device=device)).tolist() == [2.0, 4.0]


def test_unsuitable_arguments_are_named(device: torch.device) -> None:
    values = torch.ones(4, device=device)
    with pytest.raises(ValueError, match="values: expected"):
        segment_sum(values.double(), torch.zeros(2, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        segment_sum(values, torch.zeros(2, dtype=torch.int32, device=device))
