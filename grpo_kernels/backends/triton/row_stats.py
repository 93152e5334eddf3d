"""Softmax statistics of each row of a logits tile in one read, with its gradient on request."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import RowStats, Tile, TileGradient
from grpo_kernels.backends.gpu_tiles import RowConfig, row_config, rows_are_aligned
from grpo_kernels.backends.triton.codegen import PointwiseKernel
from grpo_kernels.backends.triton.common import (
    PER_ROW,
    bounded,
    check_tile,
    empty_stats,
    folded,
    launching,
    max_of,
    pointers,
    raised,
    rebased,
    row_factor,
    softmax_results,
    store_extras,
    tile_offsets,
    transform_arguments,
)
from grpo_kernels.backends.triton.dlogits import gradient_view
from grpo_kernels.backends.triton.exponentials import (
    finish_exponentials,
    first_anchor,
    raised_anchor,
    store_exponentials,
)
from grpo_kernels.backends.triton.math import LOG2_E


@triton.jit
def _with_tile(
    sums,
    logits_ptr,
    out_ptr,
    offs_v,
    start,
    end,  # of the row, if it lies in this tile; else None
    target,
    y_target,
    inner,
    factor,
    f2,
    HAS_SOFTCAP: tl.constexpr,
    EXTRAS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Add a tile to the sums of :func:`row_sums`."""
    peak, total, moment, squares, least, rivals, anchor = sums
    columns = tl.max_contiguous(start + offs_v, (1, 1, VECTOR))
    if end is None:
        mask_v = None
        x = tl.load(logits_ptr + columns)
    else:
        mask_v = columns < end
        x = tl.load(logits_ptr + columns, mask=mask_v, other=float("-inf"))
    y = bounded(x, inner, HAS_SOFTCAP)
    above = y
    if end is not None:
        if HAS_SOFTCAP:  # which turns -inf into a finite value
            y = tl.where(mask_v, y, float("-inf"))
        above = tl.where(mask_v, y, float("inf"))
    tile_peak = max_of(y)
    peak, base, total, moment, squares = raised(peak, total, moment, squares, tile_peak, f2)
    total, moment, squares, e = folded(y, base, total, moment, squares, f2, EXTRAS)
    if out_ptr is not None:
        anchor = raised_anchor(out_ptr, anchor, tile_peak, factor, offs_v, start, BLOCK_V, VECTOR)
        tl.debug_barrier()  # as in write_gradient: no warp stores before all have loaded
        store_exponentials(
            out_ptr, columns, mask_v, x, e, peak, base, anchor, f2, inner, HAS_SOFTCAP
        )
    if EXTRAS:
        least = tl.minimum(least, -max_of(-above))
        # of tiles before the target's; a greater one is no less of a rival
        rivals |= ((tile_peak >= y_target) & (start + BLOCK_V <= target)).to(tl.int32)
    return peak, total, moment, squares, least, rivals, anchor


@triton.jit
def row_sums(
    logits_ptr,  # of one row
    out_ptr,  # the same storage, or None: the row stays as it is
    num_columns,
    target,
    y_target,
    inner,
    factor,
    HAS_SOFTCAP: tl.constexpr,
    EXTRAS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Return the row's peak, its sums relative to it, whether an earlier column equals the
    target's, and the least; these two and the squares only with ``EXTRAS``. Last comes the anchor
    of the exponentials that were written to ``out_ptr``, if it is there.

    All are bounded logits y, whose scores are ``factor * y``: to take the peak off before anything
    is scaled costs no digits where logits carry a large offset.

    A tile is (depth, threads, vector), and each thread has sums of its own: so nothing crosses
    threads until the row's end. Only the last tile may have an end in it.
    """
    offs_v = tile_offsets(BLOCK_V, THREADS, VECTOR)
    peak = tl.full((THREADS,), float("-inf"), tl.float32)
    total = tl.zeros((THREADS,), tl.float32)
    moment = tl.zeros((THREADS,), tl.float32)
    squares = tl.zeros((THREADS,), tl.float32)
    f2 = tl.zeros((THREADS,), tl.float32) + factor * LOG2_E
    least = tl.full((THREADS,), float("inf"), tl.float32)
    rivals = tl.zeros((THREADS,), tl.int32)
    sums = peak, total, moment, squares, least, rivals, first_anchor(y_target)
    whole = num_columns // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        sums = _with_tile(
            sums, logits_ptr, out_ptr, offs_v, start, None, target, y_target, inner, factor, f2,
            HAS_SOFTCAP, EXTRAS, BLOCK_V, VECTOR,
        )  # fmt: skip
    if whole < num_columns:
        sums = _with_tile(
            sums, logits_ptr, out_ptr, offs_v, whole, num_columns, target, y_target, inner, factor,
            f2, HAS_SOFTCAP, EXTRAS, BLOCK_V, VECTOR,
        )  # fmt: skip
    peak, total, moment, squares, least, rivals, anchor = sums
    if EXTRAS:  # once more the columns beside the target
        columns = target // BLOCK_V * BLOCK_V + offs_v
        x = tl.load(logits_ptr + columns, mask=columns < target, other=float("-inf"))
        equal = (bounded(x, inner, HAS_SOFTCAP) == y_target) & (columns < target)
        rivals |= max_of(equal.to(tl.int32))
    row_peak = tl.max(peak, axis=0)
    # lanes that saw nothing (V < BLOCK_V, or -inf only) hold zeros
    total, moment, squares = rebased(peak, total, moment, squares, row_peak, f2)
    total = tl.sum(total.to(tl.float64), axis=0)
    moment, squares = tl.sum(moment, axis=0), tl.sum(squares, axis=0)
    rival = tl.max(rivals, axis=0) != 0
    return row_peak, total, moment, squares, rival, tl.min(least, axis=0), anchor


@triton.jit(
    # rows of the gradient may be aligned where those of the logits are not: the statistics would
    # be added up in another order than without it
    do_not_specialize=["stride_out_row"],
    do_not_specialize_on_alignment=[*PER_ROW, "unit_ptr"],
)
def _row_stats_kernel(
    logits_ptr,  # (C, V)
    out_ptr,  # (C, V), the same storage, of the same or half the width; or None
    target_ptr,  # (C,) int64
    temperature_ptr,  # (C,) or None
    logp_ptr,  # (C,) fp32, as the other results
    entropy_ptr,
    lse_ptr,  # fp64
    is_top1_ptr,  # bool
    sum_sq_probs_ptr,
    max_logit_ptr,
    min_logit_ptr,
    unit_ptr,  # of the gradient's rows, with out_ptr
    stride_row,
    stride_out_row,
    num_columns,
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    EXTRAS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_row
    if out_ptr is not None:
        if VECTOR > 1:
            stride_out_row = tl.multiple_of(stride_out_row, 16)
        out_ptr += row * stride_out_row
    factor = row_factor(outer, temperature_ptr, row, ROW_TEMPERATURE)
    target = tl.load(target_ptr + row).to(tl.int32)
    x_target = tl.load(logits_ptr + target)
    y_target = bounded(x_target, inner, HAS_SOFTCAP)
    peak, total, moment, squares, rival, least, anchor = row_sums(
        logits_ptr, out_ptr, num_columns, target, y_target, inner, factor,
        HAS_SOFTCAP, EXTRAS, BLOCK_V, THREADS, VECTOR,
    )  # fmt: skip
    logp, entropy, lse = softmax_results(y_target, peak, factor, total, moment)
    tl.store(logp_ptr + row, logp)
    tl.store(entropy_ptr + row, entropy)
    tl.store(lse_ptr + row, lse)
    if EXTRAS:
        is_top1 = (y_target == peak) & (not rival)
        store_extras(
            row, None, total, squares, is_top1, peak * factor, least * factor,
            is_top1_ptr, sum_sq_probs_ptr, max_logit_ptr, min_logit_ptr,
        )  # fmt: skip
    if out_ptr is not None:
        log_anchor = (anchor - peak) * factor - tl.log(total.to(tl.float32))  # its score less lse
        unit = finish_exponentials(
            out_ptr, x_target, target, num_columns, logp, log_anchor, inner, factor,
            HAS_SOFTCAP, BLOCK_V,
        )  # fmt: skip
        tl.store(unit_ptr + row, unit)


def row_stats(
    tile: Tile,  # fp32, bf16 or fp16, with all targets
    extras: bool,
    config: RowConfig | None = None,  # the device's
) -> RowStats:
    """Compute statistics of each row in fp32; see :class:`RowStats`."""
    stats = empty_stats(len(tile.target), tile.logits.device, extras)
    _launch(tile, stats, None, config)
    return stats


def logp_gradient_(
    tile: Tile,  # fp32 or bf16, with all targets; overwritten
    config: RowConfig | None = None,  # the device's
) -> tuple[RowStats, TileGradient]:
    """Compute the same statistics, and the bf16 gradients of the log-probabilities."""
    stats = empty_stats(len(tile.target), tile.logits.device, extras=False)
    out = gradient_view(tile.logits, torch.bfloat16)
    gradient = TileGradient(out, torch.empty_like(stats.logp))
    _launch(tile, stats, gradient, config)
    return stats, gradient


def weighted_gradient(gradient: TileGradient, dlogp: Tensor) -> TileGradient:
    """Weigh what :func:`logp_gradient_` returns; see :class:`Backend`."""
    assert gradient.row_scale is not None
    return TileGradient(gradient.dlogits, *_weighing()(dlogp, gradient.row_scale))


@functools.cache
def _weighing() -> PointwiseKernel:
    def factor(dlogp: Tensor, unit: Tensor) -> tuple[Tensor, ...]:
        return (torch.where(dlogp == 0, 0.0, dlogp * unit),)

    return PointwiseKernel.trace(factor, 2, ("dlogp", "unit"))


def _launch(
    tile: Tile, stats: RowStats, gradient: TileGradient | None, config: RowConfig | None
) -> None:
    check_tile(tile)
    logits, target, transform = tile
    rows, columns = logits.shape
    if not rows:
        return
    config = config or row_config(logits.device)
    out, unit = gradient or (None, None)
    with launching(config, logits):
        _row_stats_kernel[(rows,)](
            logits_ptr=logits,
            out_ptr=out,
            target_ptr=target.contiguous(),
            **pointers(stats),
            unit_ptr=unit,
            stride_row=logits.stride(0),
            stride_out_row=0 if out is None else out.stride(0),
            num_columns=columns,
            EXTRAS=stats.is_top1 is not None,
            **config.blocks(logits.dtype, rows_are_aligned(logits)),
            **config.options,
            **transform_arguments(transform, logits),
        )
