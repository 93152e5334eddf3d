"""The kernel that scales a gradient by a number on the device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from grpo_kernels.backends.triton import scaled_


@pytest.mark.parametrize("shape", [(0,), (1,), (5000,), (130, 77)])
@pytest.mark.parametrize("scale", [1.0, 0.25, -3.0])
def test_values(device: torch.device, shape: tuple[int, ...], scale: float) -> None:
    values = torch.randn(shape, device=device)
    exact = values * scale
    got = scaled_(values, torch.tensor(scale, device=device), torch.float32)
    assert got.data_ptr() == values.data_ptr()
    assert torch.equal(got, exact)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_another_dtype(device: torch.device, scale: float) -> None:
    """Values that fit into 11 bits: the interpreter cuts off what does not."""
    values = torch.randint(-1000, 1000, (3, 700), device=device).float()
    got = scaled_(values.clone(), torch.tensor(scale, device=device), torch.float16)
    assert got.dtype == torch.float16
    assert torch.equal(got.float(), values * scale)


def test_a_scale_of_one_touches_nothing(device: torch.device) -> None:
    """Not even a NaN changes its bits."""
    bits = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32, device=device)
    scaled_(bits.view(torch.float32), torch.ones((), device=device), torch.float32)
    assert bits.tolist() == [0x7FC00001, 0x3F800000]
