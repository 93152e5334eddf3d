"""GEMMs of 16-bit CPU matrices whose fp32 accumulators are stored as they are.

``torch.mm`` rounds them to 16 bits on a CPU. oneMKL, which torch's x86 builds contain, has the
GEMM with an fp32 result as a C function; elsewhere there is none.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_float, c_int, c_void_p
from pathlib import Path

import torch
from torch import Tensor

_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112  # the values of cblas.h
_NAMES = {torch.bfloat16: "cblas_gemm_bf16bf16f32", torch.float16: "cblas_gemm_f16f16f32"}
_SIGNATURE = [
    *[c_int] * 6,  # layout, two transpositions, m, n, k
    c_float,
    *[c_void_p, c_int] * 2,  # a and b, each with its leading dimension
    c_float,
    *[c_void_p, c_int],  # the result
]


def available(dtype: torch.dtype) -> bool:
    """Return whether this torch brings the GEMM of ``dtype`` matrices."""
    return dtype in _NAMES and _function(_NAMES[dtype]) is not None


def matmul(
    a: Tensor,  # (M, K) 16-bit; copied unless its rows or its columns are contiguous
    b: Tensor,  # (K, N) likewise
    out: Tensor,  # (M, N) fp32, columns contiguous
    accumulate: bool = False,
    alpha: float = 1.0,
) -> Tensor:
    """Compute ``out = alpha a @ b``, or ``out += alpha a @ b``, without rounding in between."""
    (rows, depth), columns = a.shape, b.shape[1]
    assert out.shape == (rows, columns) and out.dtype == torch.float32, (out.shape, out.dtype)
    assert a.dtype == b.dtype and b.shape[0] == depth, (a.shape, b.shape, a.dtype, b.dtype)
    if not out.numel():
        return out
    if not depth:
        return out if accumulate else out.zero_()
    multiply = _function(_NAMES[a.dtype])
    assert multiply is not None, "available() said no"
    a, b = _readable(a), _readable(b)
    (how_a, stride_a), (how_b, stride_b) = _layout(a), _layout(b)
    how_out, stride_out = _layout(out)
    assert how_out == _AS_IT_IS, out.stride()
    multiply(
        *(_ROW_MAJOR, how_a, how_b, rows, columns, depth),
        *(alpha, a.data_ptr(), stride_a, b.data_ptr(), stride_b),
        *(float(accumulate), out.data_ptr(), stride_out),
    )
    return out


def _readable(x: Tensor) -> Tensor:
    """Return the matrix as BLAS can describe it: gaps in one dimension only, no overlaps."""
    (rows, columns), (step, column_step) = x.shape, x.stride()
    by_rows = (column_step == 1 or columns == 1) and (step >= columns or rows == 1)
    by_columns = (step == 1 or rows == 1) and (column_step >= rows or columns == 1)
    return x if by_rows or by_columns else x.contiguous()


def _layout(x: Tensor) -> tuple[int, int]:
    """Return BLAS's name for the layout of ``x``, and its leading dimension."""
    rows, columns = x.shape
    if x.stride(1) == 1 or columns == 1:
        return _AS_IT_IS, max(x.stride(0) if rows > 1 else 0, columns)
    assert x.stride(0) == 1 or rows == 1, x.stride()
    return _TRANSPOSED, max(x.stride(1), rows)


@functools.cache
def _function(name: str) -> Callable[..., None] | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not torch.backends.mkl.is_available() or not library.exists():
        return None
    function = getattr(ctypes.CDLL(str(library)), name, None)
    if function is not None:
        function.argtypes, function.restype = _SIGNATURE, None
    return function
