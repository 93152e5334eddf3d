"""What products are made of: oneMKL's GEMMs with fp32 results, and the ends of rows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from grpo_kernels import available_backends, linear_logprobs
from grpo_kernels.head import matmul
from grpo_kernels.head.matmul import mkl_available, mkl_matmul

BACKENDS = [name for name in available_backends() if name != "reference"]
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not mkl_available(dtype), reason="no such MKL"))
    for dtype in (torch.bfloat16, torch.float16)
]
SHAPES = [(1, 1, 1), (3, 5, 7), (33, 17, 70), (64, 1, 9), (1, 40, 3), (5, 4, 0), (0, 3, 2)]


def matrix(rows: int, columns: int, dtype: torch.dtype, transposed: bool, gap: int) -> Tensor:
    """Return random values in either layout, ``gap`` unused elements behind each row of memory."""
    shape = (columns, rows) if transposed else (rows, columns)
    memory = torch.full((shape[0], shape[1] + gap), math.nan, dtype=dtype)
    memory[:, : shape[1]] = torch.randn(shape)
    x = memory[:, : shape[1]]
    return x.t() if transposed else x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_mkl_equals_fp64(dtype: torch.dtype, shape: tuple[int, int, int], accumulate: bool) -> None:
    rows, columns, depth = shape
    for transposed_a, transposed_b, gap in itertools.product((False, True), (False, True), (0, 3)):
        a = matrix(rows, depth, dtype, transposed_a, gap)
        b = matrix(depth, columns, dtype, transposed_b, gap)
        out = matrix(rows, columns, torch.float32, False, gap)
        exact = a.double() @ b.double() + (out.double() if accumulate else 0)
        assert mkl_matmul(a, b, out, accumulate) is out
        # only the fp32 sums round: a 16-bit result would be off by 1e-3
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mkl_with_any_strides(dtype: torch.dtype) -> None:
    """Gaps in both dimensions, rows in one place, overlapping rows: BLAS has no name for these."""
    memory = torch.randn(20, 30).to(dtype)
    for x in (memory[::2, ::3], memory[:1].expand(10, 30), memory.view(-1).unfold(0, 10, 3)):
        for a, b in ((x, x.t()), (x.t(), x)):
            out = mkl_matmul(a, b, torch.empty(a.shape[0], b.shape[1]))
            torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outputs", (("logprobs",), ("logprobs", "mean_logit")))
@pytest.mark.parametrize("precision", ("fp32", "input"))
def test_nan_stays_in_its_row(backend: str, outputs: tuple[str, ...], precision: str) -> None:
    """Of such sizes torch's 16-bit GEMM on a CPU reads from the next row."""
    hidden, weight = torch.randn(33, 33).bfloat16(), torch.randn(257, 33).bfloat16()
    hidden[16] = math.nan
    out = linear_logprobs(
        hidden, weight, torch.arange(33), outputs=outputs, precision=precision, backend=backend
    )
    assert out.logprobs.isnan().nonzero().flatten().tolist() == [16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("shape", [(33, 17, 70), (0, 3, 2), (3, 0, 2), (5, 4, 0)])
def test_16_bits_where_onednn_has_no_gemm(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    transposed: bool,
    first: bool,
    shape: tuple[int, int, int],
) -> None:
    """oneMKL multiplies, a few rows at a time: torch's own loops take up to 90 times as long."""
    monkeypatch.setattr(matmul, "_torch_is_slow", lambda dtype: True)
    monkeypatch.setattr(torch, "addmm", None)
    monkeypatch.setattr(matmul, "_ROUNDED_AT_ONCE", 100)
    rows, columns, depth = shape
    a, b = matrix(rows, depth, dtype, False, 3), matrix(depth, columns, dtype, True, 0)
    out = matrix(rows, columns, dtype, transposed, 0)
    exact = (0 if first else out.double()) + a.double() @ b.double()
    matmul.accumulate(out, a, b, first=first)
    torch.testing.assert_close(out, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
