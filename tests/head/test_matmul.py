"""Sums of products in fp32, where torch adds them and where it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels.head import matmul
from tests.conftest import HAS_GPU


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_product_is_added_without_rounding(
    monkeypatch: pytest.MonkeyPatch, first: bool, alpha: float
) -> None:
    """On a CPU torch has no product with an fp32 result, so it is made here."""

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return a.to(out_dtype) @ b.to(out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(matmul, "SLICE_COLUMNS", 3)
    a, b = torch.randn(7, 5).bfloat16(), torch.randn(5, 3).bfloat16()
    out = torch.full((7, 3), float("nan")) if first else torch.ones(7, 3)
    exact = (0 if first else 1) + alpha * (a.double() @ b.double())
    matmul._add_product(out, a, b, first, alpha)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_both_ways_agree_on_a_gpu(monkeypatch: pytest.MonkeyPatch, first: bool, adds: bool) -> None:
    if adds and not matmul._ADDS_TO_FP32:
        pytest.skip(f"torch {torch.__version__} has one way")
    monkeypatch.setattr(matmul, "_ADDS_TO_FP32", adds)
    a, b = (torch.randn(shape, device="cuda").bfloat16() for shape in ((64, 32), (32, 48)))
    out = torch.ones(64, 48, device="cuda")
    exact = (0 if first else 1) + 0.5 * (a.double() @ b.double())
    matmul.accumulate(out, a, b, first, alpha=0.5)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
