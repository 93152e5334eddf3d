"""Sums in a fixed order, without atomics: of gathered rows of a matrix, and over sequences."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import Entries
from grpo_kernels.backends.triton.common import OPTIONS

_ELEMENTS, _MOST_COLUMNS = 4096, 1024  # gathered at a time, with at most this many columns
_PIECE = 256  # entries of an id that are summed separately, if it has more
_BLOCK_T = 1024  # tokens, in fp64
_VECTORS = ["used_ptr", "bounds_ptr", "values_ptr", "factor_ptr", "places_ptr", "starts_ptr"]


@triton.jit
def _gathered(
    total, places_ptr, values_ptr, first, end, matrix_ptr, stride_row, offsets, mask_n,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add ``values * matrix[places]`` of a range of entries to (BLOCK_K, BLOCK_N) sums."""
    for start in range(first, end, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        mask_k = at < end
        places = tl.load(places_ptr + at, mask=mask_k, other=0).to(tl.int64)
        values = tl.load(values_ptr + at, mask=mask_k, other=0.0)
        rows = matrix_ptr + places[:, None] * stride_row + offsets[None, :]
        x = tl.load(rows, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        total += values[:, None] * x.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=_VECTORS)
def _rows_kernel(
    used_ptr,  # (C,) int32
    ids_ptr,  # (C, slots) int32
    values_ptr,  # (C, slots) fp32
    factor_ptr,  # (C,)
    matrix_ptr,  # (V, N)
    out_ptr,  # (C, N)
    slots,
    stride_row,
    stride_column,
    stride_out_row,
    stride_out_column,
    num_columns,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    used = tl.load(used_ptr + row)
    if used < 0:  # a whole row, computed elsewhere
        return
    factor = tl.load(factor_ptr + row).to(tl.float32)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_columns
    total = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    total = _gathered(
        total=total,
        places_ptr=ids_ptr + row * slots,
        values_ptr=values_ptr + row * slots,
        first=0,
        end=tl.where(factor == 0.0, 0, used),
        matrix_ptr=matrix_ptr,
        stride_row=stride_row,
        offsets=offs_n * stride_column,
        mask_n=mask_n,
        BLOCK_K=BLOCK_K,
    )
    at = out_ptr + row * stride_out_row + offs_n * stride_out_column
    tl.store(at, (tl.sum(total, axis=0) * factor).to(out_ptr.dtype.element_ty), mask=mask_n)


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=_VECTORS)
def _flatten_kernel(
    used_ptr,  # (C,) int32, of rows without a gradient 0
    starts_ptr,  # (C,) int64, start of a row's entries among all entries
    ids_ptr,  # (C, slots) int32
    values_ptr,  # (C, slots) fp32
    factor_ptr,  # (C,)
    all_ids_ptr,  # (E,) int32
    all_rows_ptr,  # (E,) int32
    all_values_ptr,  # (E,) fp32
    slots,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    used = tl.load(used_ptr + row)
    start = tl.load(starts_ptr + row)
    factor = tl.load(factor_ptr + row).to(tl.float32)
    for first in range(0, used, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        mask = slot < used
        ids = tl.load(ids_ptr + row * slots + slot, mask=mask)
        values = tl.load(values_ptr + row * slots + slot, mask=mask)
        tl.store(all_ids_ptr + start + slot, ids, mask=mask)
        tl.store(all_rows_ptr + start + slot, tl.zeros_like(ids) + row.to(tl.int32), mask=mask)
        tl.store(all_values_ptr + start + slot, values * factor, mask=mask)


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
def _pieces_kernel(
    ids_ptr,  # (E,) int32, ascending
    places_ptr,  # (E,) int32, rows of the matrix
    values_ptr,  # (E,) fp32
    matrix_ptr,  # (C, N)
    pieces_ptr,  # (E // PIECE, N) fp32
    stride_row,
    stride_column,
    num_columns,
    PIECE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum each piece whose entries all belong to one id."""
    piece = tl.program_id(0).to(tl.int64)
    first = piece * PIECE
    end = piece * PIECE + PIECE
    if tl.load(ids_ptr + first) != tl.load(ids_ptr + end - 1):
        return
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_columns
    total = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    total = _gathered(
        total=total,
        places_ptr=places_ptr,
        values_ptr=values_ptr,
        first=first,
        end=end,
        matrix_ptr=matrix_ptr,
        stride_row=stride_row,
        offsets=offs_n * stride_column,
        mask_n=mask_n,
        BLOCK_K=BLOCK_K,
    )
    tl.store(pieces_ptr + piece * num_columns + offs_n, tl.sum(total, axis=0), mask=mask_n)


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
def _columns_kernel(
    bounds_ptr,  # (V + 1,) int64, bounds of each id's entries
    places_ptr,  # (E,) int32, rows of the matrix
    values_ptr,  # (E,) fp32
    matrix_ptr,  # (C, N)
    pieces_ptr,  # (E // PIECE, N) fp32, sums of the pieces with a single id
    out_ptr,  # (V, N)
    stride_row,
    stride_column,
    stride_out_row,
    stride_out_column,
    num_columns,
    ADD: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    first = tl.load(bounds_ptr + place)
    end = tl.load(bounds_ptr + place + 1)
    if ADD and first == end:
        return
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_columns
    offsets = offs_n * stride_column
    # whole pieces are already summed; few entries have none
    whole = tl.cdiv(first, PIECE)
    last = end // PIECE
    head = tl.minimum(whole * PIECE, end)
    tail = tl.maximum(last * PIECE, head)
    total = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    total = _gathered(
        total=total,
        places_ptr=places_ptr,
        values_ptr=values_ptr,
        first=first,
        end=head,
        matrix_ptr=matrix_ptr,
        stride_row=stride_row,
        offsets=offsets,
        mask_n=mask_n,
        BLOCK_K=BLOCK_K,
    )
    total = _gathered(
        total=total,
        places_ptr=places_ptr,
        values_ptr=values_ptr,
        first=tail,
        end=end,
        matrix_ptr=matrix_ptr,
        stride_row=stride_row,
        offsets=offsets,
        mask_n=mask_n,
        BLOCK_K=BLOCK_K,
    )
    out = tl.sum(total, axis=0)
    for piece in range(whole, last):
        out += tl.load(pieces_ptr + piece * num_columns + offs_n, mask=mask_n, other=0.0)
    at = out_ptr + place * stride_out_row + offs_n * stride_out_column
    if ADD:
        out += tl.load(at, mask=mask_n, other=0.0).to(tl.float32)
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask_n)


def entries_matmul(entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Compute the product of rows of entries and a matrix; see :class:`Backend`."""
    if not out.numel():
        return
    with torch.cuda.device_of(matrix):
        _rows_kernel[_grid(out)](
            used_ptr=entries.used.contiguous(),
            ids_ptr=entries.ids.contiguous(),
            values_ptr=entries.values.contiguous(),
            factor_ptr=factor.contiguous(),
            slots=entries.ids.shape[1],
            **_product(matrix, out),
        )


def entries_transposed_matmul(
    entries: Entries,
    factor: Tensor,
    rows: Tensor,
    out: Tensor,
    add: bool,
    count: int,
) -> None:
    """Compute the product of the transposed entries and rows; see :class:`Backend`."""
    if not out.numel():
        return
    ids, places, values = _by_id(entries, factor, count)
    each = torch.arange(len(out) + 1, device=factor.device, dtype=ids.dtype)
    pieces = torch.empty((count // _PIECE, out.shape[1]), device=factor.device)
    gathered = {"places_ptr": places, "values_ptr": values, "pieces_ptr": pieces, "PIECE": _PIECE}
    product = _product(rows, out)
    with torch.cuda.device_of(rows):
        if len(pieces):
            of_out = ("out_ptr", "stride_out_row", "stride_out_column")
            given = {name: value for name, value in product.items() if name not in of_out}
            _pieces_kernel[_grid(pieces)](ids_ptr=ids, **gathered, **given)
        _columns_kernel[_grid(out)](
            bounds_ptr=torch.searchsorted(ids, each), ADD=add, **gathered, **product
        )


def _by_id(entries: Entries, factor: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids of all ``count`` entries, ascending, their rows and their values."""
    used = torch.where(factor != 0, entries.used.clamp(min=0), 0)
    ids = torch.empty(count, dtype=torch.int32, device=factor.device)
    rows = torch.empty_like(ids)
    values = torch.empty(count, device=factor.device)
    with torch.cuda.device_of(factor):
        _flatten_kernel[(len(used),)](
            used_ptr=used,
            starts_ptr=used.cumsum(0) - used,
            ids_ptr=entries.ids.contiguous(),
            values_ptr=entries.values.contiguous(),
            factor_ptr=factor.contiguous(),
            all_ids_ptr=ids,
            all_rows_ptr=rows,
            all_values_ptr=values,
            slots=entries.ids.shape[1],
            BLOCK=_PIECE,
            **OPTIONS,
        )
    ids, order = ids.sort(stable=True)  # keeps the order of rows within an id
    return ids, rows[order], values[order]


def _grid(out: Tensor) -> tuple[int, int]:
    return len(out), triton.cdiv(out.shape[1], _block_columns(out))


def _block_columns(out: Tensor) -> int:
    return min(_MOST_COLUMNS, triton.next_power_of_2(out.shape[1]))


def _product(matrix: Tensor, out: Tensor) -> dict[str, Any]:
    """Return the arguments of a product of gathered rows of a matrix."""
    block = _block_columns(out)
    return {
        "matrix_ptr": matrix,
        "out_ptr": out,
        "stride_row": matrix.stride(0),
        "stride_column": matrix.stride(1),
        "stride_out_row": out.stride(0),
        "stride_out_column": out.stride(1),
        "num_columns": out.shape[1],
        "BLOCK_K": min(_ELEMENTS // block, 32),
        "BLOCK_N": block,
        **OPTIONS,
    }


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
