"""GEMMs of a head with the requested precision, independent of torch's global switches.

The global switches belong to the user's model. While the head's GEMMs run, they set torch's
per-backend switches, the only ones that GEMMs read. (The older ``allow_tf32`` raises if both kinds
are set.)
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.head.head import Head, stats_dtype

# 16-bit partial sums, and fp16 accumulators: both round before the result
_REDUCED = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def tf32_unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why ``precision="tf32"`` is not available for these tensors; None if it is."""
    expected = "'tf32' expects fp32 tensors on a CUDA device of capability 8.0 or later"
    if dtype != torch.float32:
        return f"{expected}, got {dtype}"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{expected}, got {device} ({'ROCm' if torch.version.hip else 'no CUDA'})"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{expected}, got {major}.{minor}" if major < 8 else None


@contextmanager
def matmul_precision(device: torch.device, precision: str) -> Iterator[None]:
    """Make GEMMs on ``device`` follow ``precision`` inside; torch's switches are restored."""
    settings: dict[str, Any] = {}
    if device.type == "cuda":
        matmul = torch.backends.cuda.matmul
        fp32 = "tf32" if precision == "tf32" else "ieee"
        settings |= dict.fromkeys(_REDUCED, False)
    else:
        matmul, fp32 = torch.backends.mkldnn.matmul, "ieee"  # type: ignore[attr-defined]
    if (matmul.fp32_precision, fp32) != ("none", "ieee"):
        settings["fp32_precision"] = fp32
    before = {name: getattr(matmul, name) for name in settings}
    changed = [name for name in settings if before[name] != settings[name]]
    try:
        for name in changed:
            setattr(matmul, name, settings[name])
        yield
    finally:
        if "fp32_precision" in changed:
            matmul.fp32_precision = "none"  # inherits from torch.backends.fp32_precision ...
        for name in changed:
            if getattr(matmul, name) != before[name]:  # ... unless the value was set here
                setattr(matmul, name, before[name])


# A 16-bit weight is upcast one slice of the vocabulary at a time.
SLICE_COLUMNS = 16384


def project(hidden: Tensor, head: Head, out: Tensor) -> Tensor:
    """Write the raw logits of ``hidden`` (C, D) to ``out`` (C, V), accumulated in fp32 or better.

    ``out`` has the dtype of ``hidden``, or fp32. ``head`` comes from :meth:`Head.to`.
    """
    wide = stats_dtype(hidden.dtype)
    if head.lora is not None and out.dtype != wide:  # so that the sum is rounded once
        for start in range(0, head.weight.shape[0], SLICE_COLUMNS):
            columns = slice(start, start + SLICE_COLUMNS)
            exact = torch.empty_like(out[:, columns], dtype=wide)
            of_slice = replace(head.columns(columns), bias=None)
            out[:, columns] = project(hidden, of_slice, exact)
    else:
        _matmul(hidden, head.weight, out)
        if head.lora is not None:
            torch.addmm(out, head.lora.project_down(hidden), head.lora.b.t(), out=out)
    if head.bias is not None:
        out += head.bias
    return out


def _matmul(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Compute ``out = hidden @ weight.T``."""
    columns = hidden.shape[1]
    narrow = hidden.device.type == "cpu" and hidden.element_size() == 2
    if out.dtype == hidden.dtype and narrow and columns % _CPU_COLUMNS:
        # zeros in the columns that a GEMM would read beyond the end of a row
        hidden = torch.nn.functional.pad(hidden, (0, -columns % _CPU_COLUMNS))[:, :columns]
    accumulate(out, hidden, weight.t(), first=True)


def accumulate(
    out: Tensor,  # (M, N), fp32 or the dtype of the factors
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N)
    first: bool,
) -> None:
    """Compute ``out += a @ b`` (``=`` if ``first``) without rounding an fp32 sum."""
    beta = 0 if first else 1
    if out.dtype == a.dtype and a.device.type == "cpu" and _torch_is_slow(a.dtype):
        _accumulate_rounded(out, a, b, first)
    elif out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif a.is_cuda and first:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, out=out)
    elif mkl_available(a.dtype):
        mkl_matmul(a, b, out, accumulate=not first)
    else:
        if out.shape[0] < out.shape[1]:
            out, a, b = out.t(), b.t(), a.t()
        wide = b.float()
        for start in range(0, out.shape[0], SLICE_COLUMNS):
            rows = slice(start, start + SLICE_COLUMNS)
            place = out[rows]
            torch.addmm(place, a[rows].float(), wide, beta=beta, out=place)


_ROUNDED_AT_ONCE = 1 << 20  # fp32 sums: 4 MiB, enough for a fast GEMM


def _accumulate_rounded(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Implement ``accumulate`` for a 16-bit ``out``: a few rows of fp32 sums at a time."""
    if out.shape[0] < out.shape[1]:
        out, a, b = out.t(), b.t(), a.t()
    height = max(1, _ROUNDED_AT_ONCE // max(out.shape[1], 1))
    for place, factor in zip(out.split(height), a.split(height), strict=True):
        sums = torch.empty(place.shape)
        if not first:
            sums.copy_(place)
        mkl_matmul(factor, b, sums, accumulate=not first)
        place.copy_(sums)


@functools.cache
def _torch_is_slow(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies 16-bit matrices with its own loops on this CPU.

    It does if oneDNN has no GEMM for them, for example without AVX-512. oneMKL is up to 90 times as
    fast.
    """
    if not mkl_available(dtype) or not torch.backends.mkldnn.is_available():
        return False
    onednn = torch.ops.mkldnn
    supported = {
        torch.bfloat16: onednn._is_mkldnn_bf16_supported,
        torch.float16: onednn._is_mkldnn_fp16_supported,
    }
    return not supported[dtype]()


# On a CPU, ``torch.mm`` rounds fp32 sums of 16-bit matrices to 16 bits. oneMKL, which is part of
# torch's x86 builds, has the GEMM with an fp32 result as a C function; other builds have none.
_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112  # the values of cblas.h
_NAMES = {torch.bfloat16: "cblas_gemm_bf16bf16f32", torch.float16: "cblas_gemm_f16f16f32"}
_SIGNATURE = [
    *[c_int] * 6,  # layout, two transpositions, m, n, k
    c_float,
    *[c_void_p, c_int] * 2,  # a and b, each with its leading dimension
    c_float,
    *[c_void_p, c_int],  # the result
]


def mkl_available(dtype: torch.dtype) -> bool:
    """Return whether this torch build contains oneMKL's GEMM for ``dtype`` matrices."""
    return dtype in _NAMES and _mkl_function(_NAMES[dtype]) is not None


def mkl_matmul(
    a: Tensor,  # (M, K) 16-bit; copied unless its rows or its columns are contiguous
    b: Tensor,  # (K, N), the same
    out: Tensor,  # (M, N) fp32, columns contiguous
    accumulate: bool = False,
) -> Tensor:
    """Compute ``out = a @ b``, or ``out += a @ b``, without rounding in between."""
    (rows, depth), columns = a.shape, b.shape[1]
    assert out.shape == (rows, columns) and out.dtype == torch.float32, (out.shape, out.dtype)
    assert a.dtype == b.dtype and b.shape[0] == depth, (a.shape, b.shape, a.dtype, b.dtype)
    if not out.numel():
        return out
    if not depth:
        return out if accumulate else out.zero_()
    multiply = _mkl_function(_NAMES[a.dtype])
    assert multiply is not None, "mkl_available() said no"
    (a, how_a, stride_a), (b, how_b, stride_b) = _described(a), _described(b)
    assert out.stride(1) == 1 or columns == 1, out.stride()
    multiply(
        *(_ROW_MAJOR, how_a, how_b, rows, columns, depth),
        *(1.0, a.data_ptr(), stride_a, b.data_ptr(), stride_b),
        *(float(accumulate), out.data_ptr(), max(out.stride(0), columns)),
    )
    return out


def _described(x: Tensor) -> tuple[Tensor, int, int]:
    """Return the matrix (copied if BLAS cannot describe its layout), the layout and its stride."""
    (rows, columns), (step, column_step) = x.shape, x.stride()
    if (column_step == 1 or columns == 1) and (step >= columns or rows == 1):
        return x, _AS_IT_IS, max(step if rows > 1 else 0, columns)
    if (step == 1 or rows == 1) and column_step >= rows:
        return x, _TRANSPOSED, column_step
    return x.contiguous(), _AS_IT_IS, columns


@functools.cache
def _mkl_function(name: str) -> Callable[..., None] | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not torch.backends.mkl.is_available() or not library.exists():
        return None
    function = getattr(ctypes.CDLL(str(library)), name, None)
    if function is not None:
        function.argtypes, function.restype = _SIGNATURE, None
    return function


# On a CPU, oneDNN reads the columns of a 16-bit matrix in steps of this size, and multiplies those
# past the end by zero. A value there that looks like infinity or NaN would spoil its row.
_CPU_COLUMNS = 32


def zero_row_padding(dlogits: Tensor) -> None:
    """Zero what a GEMM may read after the end of each row, where halves of fp32 logits are."""
    (rows, columns), stride = dlogits.shape, dlogits.stride(0)
    end = min(stride, -columns % _CPU_COLUMNS + columns)
    if dlogits.device.type == "cpu" and rows and end > columns:
        first = dlogits.storage_offset() + columns
        dlogits.as_strided((rows, end - columns), (stride, 1), first).zero_()


def leading_dim(columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the leading dimension of a tile, in elements."""
    if device.type == "cpu":
        return columns
    step = 128 // dtype.itemsize  # rows of 128-byte multiples, for fast kernels and 16-byte loads
    return -(-columns // step) * step
