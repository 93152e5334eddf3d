"""Softmax statistics of each row of a logits tile in one read, optionally with its gradient.

Except at the target, the gradient of row i is ``-dlogp_i p_ij``, and ``p_ij = exp(z_ij - a_i)
exp(a_i - lse_i)`` for any anchor a_i. So ``E_ij = exp(z_ij - a_i)`` can overwrite the logits while
the row's statistics are summed. The loss comes later, as one number r_i per row, which the GEMMs
factor out of the sums: ``dhidden = r (E W)``, ``dweight = E^T (r h)``.

The anchor is the target's score, so that ``E`` represents a target's rivals however rare they are.
If the row turns out to be far above, the anchor is raised, and written values are corrected. bf16,
which has the range of fp32, can hold such values; fp16 cannot.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import RowStats, Tile, TileGradient, empty_stats, output_view
from grpo_kernels.backends.gpu_tiles import RowConfig, row_config, rows_are_aligned
from grpo_kernels.backends.triton import common
from grpo_kernels.backends.triton.codegen import PointwiseKernel
from grpo_kernels.backends.triton.math import LOG2_E

# How far, in nats, scores may be above the anchor: E up to 3e10, and a factor of at least 1e-16 of
# the gradient.
_REACH = tl.constexpr(24.0)
_LOWEST = tl.constexpr(-1e30)  # an anchor for a target without a finite score


@triton.jit
def _with_tile(
    sums,
    row,
    start,
    end,
    EXTRAS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Add a tile, possibly with the row's ``end``, to sums; with ``out_ptr`` store its ``E``."""
    peak, total, moment, squares, least, rivals, anchor = sums
    logits_ptr, out_ptr, offs_v, target, y_target, cap_scale, factor, f2 = row
    columns = start + offs_v
    mask_v = None if end is None else columns < end
    x = tl.load(logits_ptr + columns, mask_v, None if end is None else float("-inf"))
    y = common.bounded(x, cap_scale)
    above = y
    if end is not None:
        if cap_scale is not None:  # which turns -inf into a finite value
            y = tl.where(mask_v, y, float("-inf"))
        above = tl.where(mask_v, y, float("inf"))
    y = common.by_thread(y, VECTOR)
    above = common.by_thread(above, VECTOR)
    tile_peak = common.max_of(y)
    peak, base, total, moment, squares = common.raised(
        peak=peak, total=total, moment=moment, squares=squares, other_peak=tile_peak, f2=f2
    )
    total, moment, squares, e = common.folded(
        y=y, base=base, total=total, moment=moment, squares=squares, f2=f2, EXTRAS=EXTRAS
    )
    if out_ptr is not None:
        top = tl.max(tile_peak, axis=0)
        if (top - anchor) * factor > _REACH:
            shrink = tl.exp((anchor - top) * factor)
            tl.debug_barrier()  # other threads may have written what this one reads
            for earlier in range(0, start, BLOCK_V):
                at = out_ptr + earlier + offs_v
                tl.store(at, (tl.load(at).to(tl.float32) * shrink).to(out_ptr.dtype.element_ty))
            anchor = top
        tl.debug_barrier()  # as in dlogits: no warp stores before all have loaded
        lift = tl.where(peak == float("-inf"), 0.0, tl.exp2((base - anchor) * f2))
        e = common.as_loaded(e * common.spread(lift, e))
        if cap_scale is not None:
            e = e * common.softcap_slope(x, cap_scale)
        tl.store(out_ptr + columns, e.to(out_ptr.dtype.element_ty), mask=mask_v)
    if EXTRAS:
        least = tl.minimum(least, -common.max_of(-above))
        # only in tiles before the target's; a larger score is a rival, too
        rivals |= ((tile_peak >= y_target) & (start + BLOCK_V <= target)).to(tl.int32)
    return peak, total, moment, squares, least, rivals, anchor


@triton.jit(
    # rows of the gradient may be aligned although rows of the logits are not; then the statistics
    # would be summed in another order than without a gradient
    do_not_specialize=["stride_out_row"],
    do_not_specialize_on_alignment=[*common.PER_ROW, "unit_ptr"],
)
def _row_stats_kernel(
    logits_ptr,  # (C, V)
    out_ptr,  # (C, V), of the same or half the width, perhaps the same storage; or None
    target_ptr,  # (C,) int64
    temperature_ptr,  # (C,) or None
    logprobs_ptr,  # (C,) fp32, as the other results
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
    cap_scale,
    score_scale,
    BLOCK_V: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    EXTRAS: tl.constexpr = is_top1_ptr is not None
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_row
    if out_ptr is not None:
        # of the product, since a hint on an argument has no effect; a thread stores as many columns
        # at once as it loads
        out_ptr += tl.multiple_of(row * stride_out_row, VECTOR)
    factor = common.row_factor(score_scale, temperature_ptr, row)
    target = tl.load(target_ptr + row).to(tl.int32)
    x_target = tl.load(logits_ptr + target)
    y_target = common.bounded(x_target, cap_scale)

    # Sums are over bounded logits y with scores ``factor * y``: subtracting the peak before scaling
    # costs no digits if logits have a large offset. A tile is (depth, threads, vector), and each
    # thread has separate sums: only the maximum, for the gradient's anchor, crosses threads before
    # the row's end. Only the last tile may contain the row's end.
    offs_v = common.tile_offsets(BLOCK_V, THREADS, VECTOR)
    peak = tl.full((THREADS,), float("-inf"), tl.float32)
    total = tl.zeros((THREADS,), tl.float32)
    moment = tl.zeros((THREADS,), tl.float32)
    squares = tl.zeros((THREADS,), tl.float32)
    f2 = tl.zeros((THREADS,), tl.float32) + factor * LOG2_E
    least = tl.full((THREADS,), float("inf"), tl.float32)
    rivals = tl.zeros((THREADS,), tl.int32)  # whether an earlier column equals the target's
    anchor = tl.where(y_target > _LOWEST, y_target, _LOWEST)
    sums = peak, total, moment, squares, least, rivals, anchor
    this = logits_ptr, out_ptr, offs_v, target, y_target, cap_scale, factor, f2
    whole = num_columns // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        sums = _with_tile(
            sums=sums,
            row=this,
            start=start,
            end=None,
            EXTRAS=EXTRAS,
            BLOCK_V=BLOCK_V,
            VECTOR=VECTOR,
        )
    if whole < num_columns:
        sums = _with_tile(
            sums=sums,
            row=this,
            start=whole,
            end=num_columns,
            EXTRAS=EXTRAS,
            BLOCK_V=BLOCK_V,
            VECTOR=VECTOR,
        )
    thread_peak, total, moment, squares, least, rivals, anchor = sums
    if EXTRAS:  # again the columns around the target
        columns = target // BLOCK_V * BLOCK_V + offs_v
        x = tl.load(logits_ptr + columns, mask=columns < target, other=float("-inf"))
        equal = (common.bounded(x, cap_scale) == y_target) & (columns < target)
        rivals |= common.max_of(common.by_thread(equal.to(tl.int32), VECTOR))
    peak = tl.max(thread_peak, axis=0)
    # lanes that saw nothing (V < BLOCK_V, or -inf only) hold zeros
    total, moment, squares = common.rebased(
        peak=thread_peak, total=total, moment=moment, squares=squares, base=peak, f2=f2
    )
    total = tl.sum(total.to(tl.float64), axis=0)
    moment = tl.sum(moment, axis=0)
    squares = tl.sum(squares, axis=0)
    rival = tl.max(rivals, axis=0) != 0
    least = tl.min(least, axis=0)

    results = (
        logprobs_ptr,
        entropy_ptr,
        lse_ptr,
        is_top1_ptr,
        sum_sq_probs_ptr,
        max_logit_ptr,
        min_logit_ptr,
    )
    extras = None
    if EXTRAS:
        extras = squares, (y_target == peak) & (not rival), least
    logp = common.store_stats(
        results=results,
        at=row,
        mask=None,
        y_target=y_target,
        peak=peak,
        total=total,
        moment=moment,
        factor=factor,
        extras=extras,
    )
    if out_ptr is not None:  # the rest of the gradient: the target, and a factor
        at_target, unit, finite = common.at_the_target(
            logp=logp, anchor=anchor, peak=peak, total=total, factor=factor
        )
        if cap_scale is not None:
            at_target, unit = (
                at_target * common.softcap_slope(x_target, cap_scale),
                unit * cap_scale,
            )
        tl.debug_barrier()  # the target's place was written by another thread
        if finite:
            tl.store(out_ptr + target, at_target.to(out_ptr.dtype.element_ty))
        else:  # zeros and a NaN factor: the row adds nothing with weight 0, and NaN otherwise
            for start in range(0, num_columns, BLOCK_V):
                columns = start + tl.arange(0, BLOCK_V)
                zeros = tl.zeros((BLOCK_V,), tl.float32).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + columns, zeros, mask=columns < num_columns)
        tl.store(unit_ptr + row, unit)


def row_stats(
    tile: Tile, extras: bool, config: RowConfig | None = None, gradient: TileGradient | None = None
) -> RowStats:
    """Compute statistics of a tile with all targets; fill ``gradient``, maybe over its logits."""
    logits = tile.logits
    stats = empty_stats(len(tile.target), logits.device, extras)
    config = config or row_config(logits.device)
    blocks = config.blocks(logits.dtype, rows_are_aligned(logits))
    out, unit = gradient or (None, None)
    assert out is None or len(out) == 1 or out.stride(0) % blocks["VECTOR"] == 0, out.stride()
    common.launch_rows(
        _row_stats_kernel,
        tile,
        config,
        out_ptr=out,
        unit_ptr=unit,
        stride_out_row=0 if out is None else out.stride(0),
        **common.pointers(stats),
        **blocks,
    )
    return stats


def logp_gradient_(tile: Tile, config: RowConfig | None = None) -> tuple[RowStats, TileGradient]:
    """Compute the same, and the bf16 gradients of log-probabilities over the fp32 or bf16
    logits."""
    out = output_view(tile.logits, torch.bfloat16)
    gradient = TileGradient(out, torch.empty(len(out), device=out.device))
    return row_stats(tile, False, config, gradient), gradient


def weighted_gradient(gradient: TileGradient, dlogp: Tensor) -> TileGradient:
    """Weight the result of :func:`logp_gradient_`, in one kernel."""
    assert gradient.row_scale is not None
    return TileGradient(gradient.dlogits, *_weighing()(dlogp, gradient.row_scale))


@functools.cache
def _weighing() -> PointwiseKernel:
    def factor(dlogp: Tensor, unit: Tensor) -> tuple[Tensor, ...]:
        return (torch.where(dlogp == 0, 0.0, dlogp * unit),)

    return PointwiseKernel.trace(factor, ("dlogp", "unit"))
