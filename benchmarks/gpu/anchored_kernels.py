"""The anchored GEMM with a program for a block of rows and a split, or one per multiprocessor.

``anchored_forms.py`` says what they compute.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from benchmarks.gpu.rounding import as_bf16

_LOG2_E = tl.constexpr(1.0 / math.log(2.0))
_LOWEST = tl.constexpr(-1e30)  # finite, so that e * t is 0 in columns beyond the end
# New values of these bring no compilation. The number of columns is not among them: as a known
# multiple of 16 it saves a fifth of the registers.
_COUNTS = ["num_rows", "depth", "num_splits"]


@triton.jit
def _folded(acc, f2, a2, total, moment):
    t = acc * f2[:, None] - a2[:, None]
    e = tl.exp2(t)
    total += tl.sum(e, axis=1)
    moment += tl.sum(e * t, axis=1)
    return e, total, moment


@triton.jit
def _epilogue(
    acc, first_row, tile_column, rows, mask_t, target, f2, a2, total, moment,
    e_desc, y_target_ptr, num_columns,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, SUB: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Fold a tile of logits into the sums; store E, and the target's logit where it is here."""
    here = (target >= tile_column) & (target < tile_column + BLOCK_V)
    if tl.max(here.to(tl.int32), axis=0) > 0:
        columns = tile_column + tl.arange(0, BLOCK_V)
        y = tl.sum(tl.where(columns[None, :] == target[:, None], acc, 0.0), axis=1)
        tl.store(y_target_ptr + rows, y, mask=mask_t & here)
    if tile_column + BLOCK_V > num_columns:
        columns = tile_column + tl.arange(0, BLOCK_V)
        acc = tl.where((columns < num_columns)[None, :], acc, _LOWEST)
    if SUB == 1:
        e, total, moment = _folded(acc, f2, a2, total, moment)
        if e_desc is not None:
            e_desc.store([first_row, tile_column], as_bf16(e, UPCAST))
    else:
        halves = tl.permute(tl.reshape(acc, (BLOCK_T, 2, BLOCK_V // 2)), (0, 2, 1))
        low, high = tl.split(halves)
        e, total, moment = _folded(low, f2, a2, total, moment)
        if e_desc is not None:
            e_desc.store([first_row, tile_column], as_bf16(e, UPCAST))
        e, total, moment = _folded(high, f2, a2, total, moment)
        if e_desc is not None:
            e_desc.store([first_row, tile_column + BLOCK_V // 2], as_bf16(e, UPCAST))
    return total, moment


@triton.jit(do_not_specialize=_COUNTS)
def anchored_kernel(
    x_desc,  # (T, D) bf16
    w_desc,  # (V, D) bf16
    e_desc,  # (T, V) bf16, or None
    f2_ptr,  # (T,) fp32
    a2_ptr,  # (T,) fp32
    target_ptr,  # (T,) int64
    y_target_ptr,  # (T,) fp32
    sums_ptr,  # (2, splits, T) fp32: S and M
    num_rows,
    num_columns,
    depth,
    num_splits,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    SUB: tl.constexpr,
    FLAT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Give each program a block of rows and a split of the vocabulary."""
    program, num_blocks = tl.program_id(0), tl.cdiv(num_rows, BLOCK_T)
    first_block = program // (GROUP * num_splits) * GROUP
    group = tl.minimum(num_blocks - first_block, GROUP)
    within = program % (GROUP * num_splits)
    first_row, split = (first_block + within % group) * BLOCK_T, within // group
    rows = first_row + tl.arange(0, BLOCK_T)
    mask_t = rows < num_rows
    target = tl.load(target_ptr + rows, mask=mask_t, other=-1).to(tl.int32)
    f2 = tl.load(f2_ptr + rows, mask=mask_t, other=0.0)
    a2 = tl.load(a2_ptr + rows, mask=mask_t, other=0.0)
    total = tl.zeros((BLOCK_T,), tl.float32)
    moment = tl.zeros((BLOCK_T,), tl.float32)
    first_column = split * (TILES * BLOCK_V)
    count = tl.minimum(tl.cdiv(num_columns - first_column, BLOCK_V), TILES)
    for tile in tl.range(0, count, flatten=FLAT):
        tile_column = first_column + tile * BLOCK_V
        acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for start in tl.range(0, depth, BLOCK_D):
            x = x_desc.load([first_row, start])
            w = w_desc.load([tile_column, start])
            if UPCAST:  # Triton's interpreter multiplies bf16 wrongly
                x, w = x.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(x, w.T, acc)
        total, moment = _epilogue(
            acc, first_row, tile_column, rows, mask_t, target, f2, a2, total, moment,
            e_desc, y_target_ptr, num_columns, BLOCK_T, BLOCK_V, SUB, UPCAST,
        )  # fmt: skip
    at = split.to(tl.int64) * num_rows + rows
    tl.store(sums_ptr + at, total, mask=mask_t)
    at += tl.cast(num_splits, tl.int64) * num_rows
    tl.store(sums_ptr + at, moment, mask=mask_t)


@triton.jit(do_not_specialize=_COUNTS)
def persistent_kernel(
    x_desc, w_desc, e_desc, f2_ptr, a2_ptr, target_ptr, y_target_ptr,
    sums_ptr,  # (2, column tiles, T) fp32
    num_rows, num_columns, depth,
    num_splits,  # column tiles
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    SUB: tl.constexpr, FLAT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Do the same with a program per multiprocessor; neighbors work on neighboring tiles."""
    num_blocks = tl.cdiv(num_rows, BLOCK_T)
    num_tiles = num_blocks * num_splits
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLAT):
        first_block = tile // (GROUP * num_splits) * GROUP
        group = tl.minimum(num_blocks - first_block, GROUP)
        within = tile % (GROUP * num_splits)
        first_row, split = (first_block + within % group) * BLOCK_T, within // group
        tile_column = split * BLOCK_V
        acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for start in tl.range(0, depth, BLOCK_D):
            x = x_desc.load([first_row, start])
            w = w_desc.load([tile_column, start])
            if UPCAST:
                x, w = x.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(x, w.T, acc)
        rows = first_row + tl.arange(0, BLOCK_T)
        mask_t = rows < num_rows
        target = tl.load(target_ptr + rows, mask=mask_t, other=-1).to(tl.int32)
        f2 = tl.load(f2_ptr + rows, mask=mask_t, other=0.0)
        a2 = tl.load(a2_ptr + rows, mask=mask_t, other=0.0)
        total = tl.zeros((BLOCK_T,), tl.float32)
        moment = tl.zeros((BLOCK_T,), tl.float32)
        total, moment = _epilogue(
            acc, first_row, tile_column, rows, mask_t, target, f2, a2, total, moment,
            e_desc, y_target_ptr, num_columns, BLOCK_T, BLOCK_V, SUB, UPCAST,
        )  # fmt: skip
        at = split.to(tl.int64) * num_rows + rows
        tl.store(sums_ptr + at, total, mask=mask_t)
        at += tl.cast(num_splits, tl.int64) * num_rows
        tl.store(sums_ptr + at, moment, mask=mask_t)


@triton.jit
def anchor_kernel(
    x_ptr,  # (T, D)
    w_ptr,  # (V, D)
    target_ptr,  # (T,) int64
    factors_ptr,  # (T,) fp32 or None
    factor,
    f2_ptr,  # (T,) fp32, filled
    a2_ptr,  # (T,) fp32, filled
    num_rows,
    depth,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Multiply each row with the target's row of the head."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = rows < num_rows
    target = tl.load(target_ptr + rows, mask=mask_t, other=0)
    sums = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in range(0, depth, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        mask = mask_t[:, None] & (offs_d < depth)[None, :]
        x_at = rows.to(tl.int64)[:, None] * depth + offs_d[None, :]
        w_at = target.to(tl.int64)[:, None] * depth + offs_d[None, :]
        x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
        sums += x * tl.load(w_ptr + w_at, mask=mask, other=0.0).to(tl.float32)
    f2 = tl.zeros((BLOCK_T,), tl.float32) + factor
    if factors_ptr is not None:
        f2 = tl.load(factors_ptr + rows, mask=mask_t, other=0.0)
    f2 = f2 * _LOG2_E
    tl.store(f2_ptr + rows, f2, mask=mask_t)
    tl.store(a2_ptr + rows, f2 * tl.sum(sums, axis=1), mask=mask_t)
