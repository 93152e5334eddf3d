"""Softmax statistics and the gradient of log-probabilities, in the epilogue of the logits GEMM.

As in :mod:`row_stats`, the gradient of a row, except at the target, is ``E = exp(z - anchor)``
times a number that depends on the loss. Here the anchor is known before the GEMM: it is the
target's logit, which a small kernel computes. So the epilogue of the GEMM can store ``E`` in bf16
and sum each row. Logits are never in memory.

Two more launches repair rows with a sum of more than 55 nats above the target's score; without such
rows their programs end immediately. They recompute sums that overflowed, relative to their peaks,
and then ``E``, relative to the row's logsumexp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import RowStats, TileGradient, empty_stats
from grpo_kernels.backends.gpu_tiles import NOT_FUSED, LinearConfig, linear_config, row_stride
from grpo_kernels.backends.triton import common
from grpo_kernels.backends.triton.linear_stats import LinearLaunch
from grpo_kernels.backends.triton.linear_tile import (
    block_and_split,
    constants,
    described,
    logits_tile,
    operands,
)
from grpo_kernels.backends.triton.math import LOG2_E, rounded
from grpo_kernels.head import Head

TARGET_ROWS = 64  # rows of a block of targets
OPTIONS = {"num_warps": 4, "num_stages": 3, **NOT_FUSED}  # for the kernel of targets
_NOTHING = tl.constexpr(-1e30)  # a logit with probability 0; finite, so that e * t is 0
_COUNTS = ["num_rows", "num_splits"]  # new values of these do not recompile
_PER_ROW = [*common.PER_ROW, "anchor_ptr", "sums_ptr", "moved_ptr", "unit_ptr"]


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_PER_ROW)
def _target_logits_kernel(
    x_ptr,  # (T, D) bf16, contiguous
    weight_ptr,  # (V, D) bf16
    target_ptr,  # (T,) int64
    anchor_ptr,  # (T,) fp32, the targets' raw logits
    num_rows,
    num_columns,
    depth,
    stride_wv,
    EVEN_D: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # the diagonal of a product, in the steps of the GEMM: a dot product would round differently,
    # and E would not be 1 at the target
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = (rows < num_rows)[:, None]
    offs_d = tl.arange(0, BLOCK_D)
    target = tl.load(target_ptr + rows, mask=rows < num_rows, other=0)
    target = tl.minimum(target, num_columns - 1)  # wrong targets are asserted later
    acc = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    for start in tl.range(0, depth, BLOCK_D):
        mask = mask_t
        if not EVEN_D:
            mask = mask_t & (start + offs_d < depth)[None, :]
        offsets = (start + offs_d)[None, :]
        x = tl.load(x_ptr + rows[:, None] * depth + offsets, mask=mask, other=0.0)
        w_ptrs = weight_ptr + target[:, None] * stride_wv + offsets
        w = tl.load(w_ptrs, mask=mask, other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    diagonal = tl.arange(0, BLOCK_T)[:, None] == tl.arange(0, BLOCK_T)[None, :]
    tl.store(anchor_ptr + rows, tl.sum(tl.where(diagonal, acc, 0.0), axis=1), mask=rows < num_rows)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_PER_ROW)
def anchored_kernel(
    x_ptr,  # (T, D) bf16, contiguous, or its descriptor
    weight_ptr,  # (V, D) bf16, or its descriptor
    exp_ptr,  # (T, V) bf16, or its descriptor: E
    temperature_ptr,  # (T,) or None
    anchor_ptr,  # (T,) fp32
    sums_ptr,  # (3, splits, T) fp32: the anchor, and the sums of E and E log2 E
    num_rows,
    num_columns,
    depth,  # D
    stride_wv,
    stride_exp,
    num_splits,
    score_scale,
    DESCRIPTORS: tl.constexpr,
    EVEN_D: tl.constexpr,  # D is a multiple of BLOCK_D
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILES: tl.constexpr,  # of a split
    GROUP: tl.constexpr,
    SUBTILES: tl.constexpr,  # 1 or 2, of a tile, one after the other
    FLAT: tl.constexpr,  # loads of the next tile start in the epilogue
):
    SUBTILE_V: tl.constexpr = BLOCK_V // SUBTILES
    first_row, split = block_and_split(num_rows, num_splits, BLOCK_T, GROUP)
    rows = first_row + tl.arange(0, BLOCK_T)
    mask_t = rows < num_rows
    anchor = tl.load(anchor_ptr + rows, mask=mask_t, other=0.0)
    f2 = common.row_factor(score_scale, temperature_ptr, tl.minimum(rows, num_rows - 1)) * LOG2_E
    f2 += tl.zeros((BLOCK_T,), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    moment = tl.zeros((BLOCK_T,), tl.float32)
    first_column = split * (TILES * BLOCK_V)
    count = tl.minimum(tl.cdiv(num_columns - first_column, BLOCK_V), TILES)
    for tile in tl.range(0, count, flatten=FLAT):
        tile_column = first_column + tile * BLOCK_V
        acc = logits_tile(
            x_ptr=x_ptr,
            weight_ptr=weight_ptr,
            first_row=first_row,
            first_column=tile_column,
            num_rows=num_rows,
            num_columns=num_columns,
            depth=depth,
            stride_wv=stride_wv,
            DESCRIPTORS=DESCRIPTORS,
            EVEN_D=EVEN_D,
            UPCAST=UPCAST,
            BLOCK_T=BLOCK_T,
            BLOCK_V=BLOCK_V,
            BLOCK_D=BLOCK_D,
        )
        subtiles = (acc,)
        if SUBTILES == 2:
            subtiles = tl.split(tl.permute(tl.reshape(acc, (BLOCK_T, 2, SUBTILE_V)), (0, 2, 1)))
        for subtile in tl.static_range(SUBTILES):
            column = tile_column + subtile * SUBTILE_V
            columns = column + tl.arange(0, SUBTILE_V)
            y = subtiles[subtile]
            if column + SUBTILE_V > num_columns:
                y = tl.where((columns < num_columns)[None, :], y, _NOTHING)
            t = (y - anchor[:, None]) * f2[:, None]
            e = tl.exp2(t)
            total += tl.sum(e, axis=1)
            moment += tl.sum(e * t, axis=1)
            e = rounded(e, tl.bfloat16, UPCAST)
            if DESCRIPTORS:  # stores stop at the ends
                exp_ptr.store([first_row, column], e)
            else:
                e_ptrs = exp_ptr + rows.to(tl.int64)[:, None] * stride_exp + columns[None, :]
                tl.store(e_ptrs, e, mask=mask_t[:, None] & (columns < num_columns)[None, :])
    at = split.to(tl.int64) * num_rows + rows
    size = tl.cast(num_splits, tl.int64) * num_rows
    tl.store(sums_ptr + at, anchor, mask=mask_t)
    tl.store(sums_ptr + size + at, total, mask=mask_t)
    tl.store(sums_ptr + 2 * size + at, moment, mask=mask_t)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_PER_ROW)
def _moved_kernel(
    x_ptr,  # as for :func:`anchored_kernel`
    weight_ptr,
    exp_ptr,  # (T, V) bf16
    target_ptr,
    temperature_ptr,
    anchor_ptr,
    moved_ptr,  # (T,) bool, the rows to compute again
    unit_ptr,  # (T,) fp32; NaN: the row becomes zeros
    num_rows,
    num_columns,
    depth,
    stride_wv,
    stride_exp,
    num_splits,
    score_scale,
    DESCRIPTORS: tl.constexpr,
    EVEN_D: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store E of moved rows relative to their new anchors, except at the target."""
    first_row, split = block_and_split(num_rows, num_splits, BLOCK_T, GROUP)
    rows = first_row + tl.arange(0, BLOCK_T)
    moved = tl.load(moved_ptr + rows, mask=rows < num_rows, other=0).to(tl.int1)
    if tl.max(moved.to(tl.int32), axis=0) == 0:
        return
    target = tl.load(target_ptr + rows, mask=moved, other=-1).to(tl.int32)
    anchor = tl.load(anchor_ptr + rows, mask=moved, other=0.0)
    unit = tl.load(unit_ptr + rows, mask=moved, other=0.0)
    f2 = common.row_factor(score_scale, temperature_ptr, tl.minimum(rows, num_rows - 1)) * LOG2_E
    f2 += tl.zeros((BLOCK_T,), tl.float32)
    first_column = split * (TILES * BLOCK_V)
    for tile in range(tl.minimum(tl.cdiv(num_columns - first_column, BLOCK_V), TILES)):
        tile_column = first_column + tile * BLOCK_V
        y = logits_tile(
            x_ptr=x_ptr,
            weight_ptr=weight_ptr,
            first_row=first_row,
            first_column=tile_column,
            num_rows=num_rows,
            num_columns=num_columns,
            depth=depth,
            stride_wv=stride_wv,
            DESCRIPTORS=DESCRIPTORS,
            EVEN_D=EVEN_D,
            UPCAST=UPCAST,
            BLOCK_T=BLOCK_T,
            BLOCK_V=BLOCK_V,
            BLOCK_D=BLOCK_D,
        )
        columns = tile_column + tl.arange(0, BLOCK_V)
        e = tl.exp2((y - anchor[:, None]) * f2[:, None])
        e = rounded(tl.where((unit == unit)[:, None], e, 0.0), tl.bfloat16, UPCAST)
        mask = moved[:, None] & (columns < num_columns)[None, :]
        mask &= columns[None, :] != target[:, None]
        e_ptrs = exp_ptr + rows.to(tl.int64)[:, None] * stride_exp + columns[None, :]
        tl.store(e_ptrs, e, mask=mask)


def linear_logp_gradient(
    hidden: Tensor,  # (T, D) bf16
    head: Head,  # with only a weight, multiplied in bf16
    target: Tensor,  # (T,) int64 in [0, V)
    out: Tensor,  # (T, V) bf16
    config: LinearConfig | None = None,  # the table's
) -> tuple[RowStats, TileGradient]:
    """Compute statistics, and the gradient of each row's log-probability in ``out``, as
    :func:`logp_gradient_` does from logits."""
    config = config or linear_config(hidden.dtype, head)
    hidden, head, target = operands(hidden, head, target)
    rows = len(hidden)
    device = hidden.device
    stats = empty_stats(rows, device, extras=False)
    unit = torch.empty(rows, device=device)
    if not rows:
        return stats, TileGradient(out, unit)
    launch = LinearLaunch.of(hidden, head, target, config, extras=False)
    anchor = launch.y_target
    moved = torch.empty_like(unit, dtype=torch.bool)
    shared = {"anchor_ptr": anchor, "stride_exp": out.stride(0)}
    blocks = constants(config, hidden.shape[1])
    with common.launching(config, hidden):
        _target_logits_kernel[(triton.cdiv(rows, TARGET_ROWS),)](
            x_ptr=hidden,
            weight_ptr=head.weight,
            target_ptr=target,
            anchor_ptr=anchor,
            num_rows=rows,
            num_columns=len(head.weight),
            depth=hidden.shape[1],
            stride_wv=row_stride(head.weight),
            EVEN_D=blocks["EVEN_D"],
            UPCAST=blocks["UPCAST"],
            BLOCK_T=TARGET_ROWS,
            BLOCK_D=config.block_d,
            **OPTIONS,
        )
        anchored_kernel[launch.grid](
            exp_ptr=described(out, config.block_t, config, config.block_v // config.subtiles),
            sums_ptr=launch.sums,
            SUBTILES=config.subtiles,
            FLAT=bool(config.flat),
            **launch.products,
            **shared,
            **blocks,
        )
        launch.add_up(torch.float32, repair=True)
        launch.merge(stats, exp_ptr=out, unit_ptr=unit, moved_ptr=moved, **shared)
        _moved_kernel[launch.grid](
            exp_ptr=out,
            target_ptr=target,
            unit_ptr=unit,
            moved_ptr=moved,
            **launch.products,
            **shared,
            **blocks,
        )
    return stats, TileGradient(out, unit)
