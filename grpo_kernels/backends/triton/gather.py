"""Weighted sums of gathered rows of a matrix: products with entries, in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import Entries
from grpo_kernels.backends.triton.common import on_device

_BLOCK_K, _BLOCK_N = 16, 256  # gathered rows in flight, and columns
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _weighted_rows(matrix_ptr, places, weights, stride_row, stride_column, mask_k, offs_n, mask_n):
    """Return ``weights`` times the rows of a matrix at ``places``, (BLOCK_K, BLOCK_N)."""
    at = places.to(tl.int64)[:, None] * stride_row + offs_n[None, :] * stride_column
    rows = tl.load(matrix_ptr + at, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
    return weights[:, None] * rows.to(tl.float32)


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["used_ptr", "factor_ptr"])
def _entries_matmul_kernel(
    ids_ptr,  # (C, slots) int32
    values_ptr,  # (C, slots)
    used_ptr,  # (C,) int32
    factor_ptr,  # (C,)
    matrix_ptr,  # (V, N)
    out_ptr,  # (C, N)
    slots,
    stride_matrix_row,
    stride_matrix_column,
    stride_out_row,
    stride_out_column,
    num_columns,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    used = tl.load(used_ptr + row)
    if used >= 0:
        offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < num_columns
        offs_k = tl.arange(0, BLOCK_K)
        factor = tl.load(factor_ptr + row).to(tl.float32)
        used = tl.where(factor == 0.0, 0, used)  # a row without weight gathers nothing
        total = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
        for start in range(0, used, BLOCK_K):
            mask_k = start + offs_k < used
            entries = row * slots + start + offs_k
            ids = tl.load(ids_ptr + entries, mask=mask_k, other=0)
            values = tl.load(values_ptr + entries, mask=mask_k, other=0.0)
            total += _weighted_rows(
                matrix_ptr,
                ids,
                values * factor,
                stride_matrix_row,
                stride_matrix_column,
                mask_k,
                offs_n,
                mask_n,
            )
        out = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)
        at = out_ptr + row * stride_out_row + offs_n * stride_out_column
        tl.store(at, out, mask=mask_n)


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["factor_ptr"])
def _entries_transposed_matmul_kernel(
    bounds_ptr,  # (V + 1,) int64, of each column's entries
    order_ptr,  # (C * slots,) int64, the entries by column, then by row
    values_ptr,  # (C, slots)
    factor_ptr,  # (C,)
    rows_ptr,  # (C, N)
    out_ptr,  # (V, N)
    slots,
    stride_rows_row,
    stride_rows_column,
    stride_out_row,
    stride_out_column,
    num_columns,
    ADD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64)
    first = tl.load(bounds_ptr + column)
    end = tl.load(bounds_ptr + column + 1)
    if (first < end) | (not ADD):
        offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < num_columns
        offs_k = tl.arange(0, BLOCK_K)
        total = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
        for start in range(first, end, BLOCK_K):
            mask_k = start + offs_k < end
            entries = tl.load(order_ptr + start + offs_k, mask=mask_k, other=0)
            rows = entries.to(tl.int32) // slots
            values = tl.load(values_ptr + entries, mask=mask_k, other=0.0)
            factor = tl.load(factor_ptr + rows, mask=mask_k, other=0.0).to(tl.float32)
            total += _weighted_rows(
                rows_ptr,
                rows,
                values * factor,
                stride_rows_row,
                stride_rows_column,
                mask_k,
                offs_n,
                mask_n,
            )
        at = out_ptr + column * stride_out_row + offs_n * stride_out_column
        out = tl.sum(total, axis=0)
        if ADD:
            out += tl.load(at, mask=mask_n, other=0.0).to(tl.float32)
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask_n)


def entries_matmul(entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Compute the product of rows of entries and a matrix; see :class:`Backend`."""
    columns = out.shape[1]
    if out.numel():
        with on_device(matrix):
            _entries_matmul_kernel[(len(out), triton.cdiv(columns, _BLOCK_N))](
                ids_ptr=entries.ids.contiguous(),
                values_ptr=entries.values.contiguous(),
                used_ptr=entries.used.contiguous(),
                factor_ptr=factor.contiguous(),
                matrix_ptr=matrix,
                out_ptr=out,
                slots=entries.columns,
                stride_matrix_row=matrix.stride(0),
                stride_matrix_column=matrix.stride(1),
                stride_out_row=out.stride(0),
                stride_out_column=out.stride(1),
                num_columns=columns,
                BLOCK_K=_BLOCK_K,
                BLOCK_N=_BLOCK_N,
                **_OPTIONS,
            )


def entries_transposed_matmul(
    entries: Entries, factor: Tensor, rows: Tensor, out: Tensor, add: bool
) -> None:
    """Compute the product of the transposed entries and rows; see :class:`Backend`."""
    columns = out.shape[1]
    assert entries.ids.numel() < 1 << 31  # the kernel divides in 32 bits
    if out.numel():
        order, bounds = _by_column(entries, factor, len(out))
        with on_device(rows):
            _entries_transposed_matmul_kernel[(len(out), triton.cdiv(columns, _BLOCK_N))](
                bounds_ptr=bounds,
                order_ptr=order,
                values_ptr=entries.values.contiguous(),
                factor_ptr=factor.contiguous(),
                rows_ptr=rows,
                out_ptr=out,
                slots=entries.columns,
                stride_rows_row=rows.stride(0),
                stride_rows_column=rows.stride(1),
                stride_out_row=out.stride(0),
                stride_out_column=out.stride(1),
                num_columns=columns,
                ADD=add,
                BLOCK_K=_BLOCK_K,
                BLOCK_N=_BLOCK_N,
                **_OPTIONS,
            )


def _by_column(entries: Entries, factor: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return the places of all entries, by column and then by row, and where each column begins.

    The host does not wait for their number: slots without an entry come last.
    """
    device = factor.device
    slot = torch.arange(entries.columns, device=device)
    meant = (slot < entries.used[:, None]) & (factor != 0)[:, None]
    ids, order = torch.where(meant, entries.ids, columns).flatten().sort(stable=True)
    each = torch.arange(columns + 1, device=device, dtype=ids.dtype)
    return order, torch.searchsorted(ids, each)
