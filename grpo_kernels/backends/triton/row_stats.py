"""Softmax statistics of each row of a logits tile, in one read."""

from __future__ import annotations

import triton
import triton.language as tl

from grpo_kernels.backends.base import RowStats, Tile
from grpo_kernels.backends.configs import RowConfig, row_config
from grpo_kernels.backends.triton.common import (
    PER_ROW,
    bounded,
    check_tile,
    empty_stats,
    folded,
    launching,
    pointers,
    raised,
    rebased,
    row_factor,
    softmax_results,
    store_extras,
    transform_arguments,
)
from grpo_kernels.backends.triton.exponentials import (
    first_anchor,
    raised_anchor,
    store_exponentials,
)
from grpo_kernels.backends.triton.math import LOG2_E


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
    LANES: tl.constexpr,
):
    """Return the row's peak, its sums relative to it, whether an earlier column equals the
    target's, and the least; these two and the squares only with ``EXTRAS``. Last comes the anchor
    of the exponentials that were written to ``out_ptr``, if it is there.

    All are bounded logits y, whose scores are ``factor * y``: to take the peak off before anything
    is scaled costs no digits where logits carry a large offset.

    A thread holds whole columns of a tile (depth, lanes), and each lane has sums of its own: so
    nothing crosses threads until the row's end.
    """
    VECTOR: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    depth = tl.arange(0, BLOCK_V // LANES)
    offs_v = depth[:, None] * LANES + tl.arange(0, LANES)[None, :]
    peak = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    moment = tl.zeros((LANES,), tl.float32)
    squares = tl.zeros((LANES,), tl.float32)
    f2 = tl.zeros((LANES,), tl.float32) + factor * LOG2_E
    least = tl.full((LANES,), float("inf"), tl.float32)
    rivals = tl.zeros((LANES,), tl.int32)
    anchor = first_anchor(y_target)
    for start in range(0, num_columns, BLOCK_V):
        columns = tl.max_contiguous(start + offs_v, (1, VECTOR))
        mask_v = columns < num_columns
        x = tl.load(logits_ptr + columns, mask=mask_v, other=float("-inf"))
        y = bounded(x, inner, HAS_SOFTCAP)
        if HAS_SOFTCAP:  # which turns -inf into a finite value
            y = tl.where(mask_v, y, float("-inf"))
        tile_peak = tl.max(y, axis=0)
        peak, base, total, moment, squares = raised(peak, total, moment, squares, tile_peak, f2)
        total, moment, squares, e = folded(y, base, total, moment, squares, f2, 0, EXTRAS)
        if out_ptr is not None:
            anchor = raised_anchor(
                out_ptr, anchor, tile_peak, factor, offs_v, start, BLOCK_V, VECTOR
            )
            tl.debug_barrier()  # as in write_gradient: no warp stores before all have loaded
            store_exponentials(
                out_ptr, columns, mask_v, x, e, peak, base, anchor, f2, inner, HAS_SOFTCAP
            )
        if EXTRAS:
            least = tl.minimum(least, tl.min(tl.where(mask_v, y, float("inf")), axis=0))
            equal = (y == y_target) & (columns < target)
            rivals |= tl.max(equal.to(tl.int32), axis=0)

    row_peak = tl.max(peak, axis=0)
    # lanes that saw nothing (V < BLOCK_V, or -inf only) hold zeros
    total, moment, squares = rebased(peak, total, moment, squares, row_peak, f2)
    rival = tl.max(rivals, axis=0) != 0
    return (
        row_peak, tl.sum(total, axis=0), tl.sum(moment, axis=0), tl.sum(squares, axis=0),
        rival, tl.min(least, axis=0), anchor,
    )  # fmt: skip


@triton.jit
def write_statistics(
    logits_ptr,  # of one row
    out_ptr,  # as in row_sums
    row,
    target,
    factor,
    logp_ptr,  # (C,), as the next two
    entropy_ptr,
    lse_ptr,
    num_columns,
    inner,
    HAS_SOFTCAP: tl.constexpr,
    EXTRAS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store the statistics of every call; return them, the target's y and the row's sums."""
    y_target = bounded(tl.load(logits_ptr + target), inner, HAS_SOFTCAP)
    sums = row_sums(
        logits_ptr, out_ptr, num_columns, target, y_target, inner, factor,
        HAS_SOFTCAP, EXTRAS, BLOCK_V, LANES,
    )  # fmt: skip
    peak, total, moment = sums[0], sums[1], sums[2]
    d_target = (y_target - peak) * factor
    logp, entropy, lse = softmax_results(d_target, peak * factor, total, moment)
    tl.store(logp_ptr + row, logp)
    tl.store(entropy_ptr + row, entropy)
    tl.store(lse_ptr + row, lse)
    return logp, entropy, lse, y_target, sums


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _row_stats_kernel(
    logits_ptr,  # (C, V)
    target_ptr,  # (C,) int64
    temperature_ptr,  # (C,) or None
    logp_ptr,  # (C,) fp32, as the other results
    entropy_ptr,
    lse_ptr,  # fp64
    is_top1_ptr,  # bool
    sum_sq_probs_ptr,
    max_logit_ptr,
    min_logit_ptr,
    stride_row,
    num_columns,
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    EXTRAS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_row
    factor = row_factor(outer, temperature_ptr, row, ROW_TEMPERATURE)
    target = tl.load(target_ptr + row).to(tl.int32)
    _, _, _, y_target, sums = write_statistics(
        logits_ptr, None, row, target, factor, logp_ptr, entropy_ptr, lse_ptr, num_columns, inner,
        HAS_SOFTCAP, EXTRAS, BLOCK_V, LANES,
    )  # fmt: skip
    if EXTRAS:
        peak, total, _, squares, rival, least, _ = sums
        is_top1 = (y_target == peak) & (not rival)
        store_extras(
            row, None, total, squares, is_top1, peak * factor, least * factor,
            is_top1_ptr, sum_sq_probs_ptr, max_logit_ptr, min_logit_ptr,
        )  # fmt: skip


def row_stats(
    tile: Tile,  # fp32, bf16 or fp16, with all targets
    extras: bool,
    config: RowConfig | None = None,  # the table's
) -> RowStats:
    """Compute statistics of each row in fp32; see :class:`RowStats`."""
    check_tile(tile)
    logits, target, transform = tile
    rows, columns = logits.shape
    stats = empty_stats(rows, logits.device, extras)
    if rows:
        config = config or row_config("stats", logits.dtype, columns, logits.device)
        with launching(config, logits):
            _row_stats_kernel[(rows,)](
                logits_ptr=logits,
                target_ptr=target.contiguous(),
                **pointers(stats),
                stride_row=logits.stride(0),
                num_columns=columns,
                EXTRAS=extras,
                BLOCK_V=config.columns(logits.dtype),
                LANES=config.lanes(logits.dtype),
                **config.options,
                **transform_arguments(transform, logits),
            )
    return stats
