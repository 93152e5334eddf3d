"""Sums in a fixed order, without atomics: of gathered rows of a matrix, and over sequences."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import Entries
from grpo_kernels.backends.triton.common import OPTIONS

_BLOCK_K, _BLOCK_N = 16, 256  # gathered rows in flight, and columns
_BLOCK_T = 1024  # tokens, in fp64


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["used_ptr", "factor_ptr"])
def _gathered_sums_kernel(
    used_ptr,  # (C,) int32, of the entries in their order; None: of their transpose
    ids_ptr,  # (C, slots) int32, likewise
    bounds_ptr,  # (V + 1,) int64, of each column's entries in the transpose; else None
    order_ptr,  # (C * slots,) int64, the entries by column, then by row; else None
    values_ptr,  # (C, slots)
    factor_ptr,  # (C,)
    matrix_ptr,  # (V, N), of the transpose (C, N)
    out_ptr,  # (C, N), of the transpose (V, N)
    slots,
    stride_matrix_row,
    stride_matrix_column,
    stride_out_row,
    stride_out_column,
    num_columns,
    ADD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    if order_ptr is None:
        used = tl.load(used_ptr + place)
        meant = used >= 0
        # a row without weight gathers nothing
        used = tl.where(tl.load(factor_ptr + place).to(tl.float32) == 0.0, 0, used)
        first = place * slots
        end = first + used
    else:
        first = tl.load(bounds_ptr + place)
        end = tl.load(bounds_ptr + place + 1)
        meant = (first < end) | (not ADD)
    if meant:
        offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < num_columns
        offs_k = tl.arange(0, BLOCK_K)
        total = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
        for start in range(first, end, BLOCK_K):
            entries = start + offs_k
            mask_k = entries < end
            if order_ptr is not None:
                entries = tl.load(order_ptr + entries, mask=mask_k, other=0)
            rows = entries.to(tl.int32) // slots
            values = tl.load(values_ptr + entries, mask=mask_k, other=0.0)
            weights = values * tl.load(factor_ptr + rows, mask=mask_k, other=0.0).to(tl.float32)
            if order_ptr is None:
                rows = tl.load(ids_ptr + entries, mask=mask_k, other=0)
            at = rows.to(tl.int64)[:, None] * stride_matrix_row
            at += offs_n[None, :] * stride_matrix_column
            gathered = tl.load(matrix_ptr + at, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
            total += weights[:, None] * gathered.to(tl.float32)
        at = out_ptr + place * stride_out_row + offs_n * stride_out_column
        out = tl.sum(total, axis=0)
        if ADD:
            out += tl.load(at, mask=mask_n, other=0.0).to(tl.float32)
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask_n)


def entries_matmul(entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Compute the product of rows of entries and a matrix; see :class:`Backend`."""
    places = {"used_ptr": entries.used.contiguous(), "ids_ptr": entries.ids.contiguous()}
    absent = {"bounds_ptr": None, "order_ptr": None}
    _launch(entries, factor, matrix, out, ADD=False, **places, **absent)


def entries_transposed_matmul(
    entries: Entries, factor: Tensor, rows: Tensor, out: Tensor, add: bool
) -> None:
    """Compute the product of the transposed entries and rows; see :class:`Backend`."""
    # by column and then by row, those that are none last: the host does not wait for their number
    slot, columns = torch.arange(entries.ids.shape[1], device=factor.device), len(out)
    meant = (slot < entries.used[:, None]) & (factor != 0)[:, None]
    ids, order = torch.where(meant, entries.ids, columns).flatten().sort(stable=True)
    each = torch.arange(columns + 1, device=factor.device, dtype=ids.dtype)
    places = {"bounds_ptr": torch.searchsorted(ids, each), "order_ptr": order}
    _launch(entries, factor, rows, out, ADD=add, used_ptr=None, ids_ptr=None, **places)


def _launch(
    entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor, **arguments: object
) -> None:
    """Launch the kernel, of which the ``arguments`` say in which order it sums."""
    assert entries.ids.numel() < 1 << 31  # the kernel divides in 32 bits
    if not out.numel():
        return
    with torch.cuda.device_of(matrix):
        _gathered_sums_kernel[(len(out), triton.cdiv(out.shape[1], _BLOCK_N))](
            values_ptr=entries.values.contiguous(),
            factor_ptr=factor.contiguous(),
            matrix_ptr=matrix,
            out_ptr=out,
            slots=entries.ids.shape[1],
            stride_matrix_row=matrix.stride(0),
            stride_matrix_column=matrix.stride(1),
            stride_out_row=out.stride(0),
            stride_out_column=out.stride(1),
            num_columns=out.shape[1],
            BLOCK_K=_BLOCK_K,
            BLOCK_N=_BLOCK_N,
            **arguments,
            **OPTIONS,
        )


@triton.jit(do_not_specialize_on_alignment=["values_ptr", "bounds_ptr", "sums_ptr"])
def _segment_sum_kernel(
    values_ptr,  # (T,) fp32
    bounds_ptr,  # (B + 1,) int64
    sums_ptr,  # (B,)
    BLOCK: tl.constexpr,
):
    segment = tl.program_id(0).to(tl.int64)
    first = tl.load(bounds_ptr + segment)
    end = tl.load(bounds_ptr + segment + 1)
    offs_t = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(first, end, BLOCK):
        tokens = start + offs_t
        value = tl.load(values_ptr + tokens, mask=tokens < end, other=0.0)
        total += value.to(tl.float64)
    tl.store(sums_ptr + segment, tl.sum(total, axis=0).to(sums_ptr.dtype.element_ty))


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum fp32 (T,) over each sequence of a packed batch, (B,); (B + 1,) int64 bounds ascend."""
    assert values.dtype == torch.float32 and cu_seqlens.dtype == torch.int64
    sums = values.new_empty(len(cu_seqlens) - 1)
    if sums.numel():
        with torch.cuda.device_of(values):
            _segment_sum_kernel[(sums.numel(),)](
                values_ptr=values.contiguous(),
                bounds_ptr=cu_seqlens.contiguous(),
                sums_ptr=sums,
                BLOCK=_BLOCK_T,
                **OPTIONS,
            )
    return sums
