"""The sizes of a row's entries, computed from logits or from ``E``.

``E`` is the gradient of a row's log-probability with respect to its logits, up to a factor.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from grpo_kernels.backends.base import ANY_ERROR, Entries, RowStats, StatsGrad, Tile, TileGradient
from grpo_kernels.backends.entries import STRANDS, TINY
from grpo_kernels.backends.gpu_tiles import RowConfig
from grpo_kernels.backends.triton import common
from grpo_kernels.backends.triton.math import LN2

ANY_ERROR_CUT = tl.constexpr(ANY_ERROR)
LEAST_CUT = tl.constexpr(TINY)
NUM_STRANDS = tl.constexpr(STRANDS)
READING_WARPS = 8
POINTERS = [
    *common.PER_ROW,
    "unit_ptr",
    "weight_ptr",
    "cuts_ptr",
    "sums_ptr",
    "tail_ptr",
    "squares_ptr",
]
POINTERS += [f"{name}_ptr" for name in Entries._fields]


@triton.jit
def row_values(
    logits_ptr,
    unit_ptr,
    target_ptr,
    temperature_ptr,
    entropy_ptr,
    lse_ptr,
    dlogp_ptr,
    dentropy_ptr,
    stride_row,
    num_columns,
    cap_scale,
    score_scale,
):
    """Return what :func:`entry_sizes` needs of this program's row, and whether its softmax is
    finite.

    Values that are not needed are 0: Triton 3.6 cannot return None.
    """
    row = tl.program_id(0).to(tl.int64)
    factor = common.row_factor(score_scale, temperature_ptr, row)
    slope = factor if cap_scale is None else factor * cap_scale
    lse = tl.load(lse_ptr + row)
    finite = lse - lse == 0.0
    constant, by_log = 0.0, 0.0  # the gradient is p times a constant plus a share of log2 p
    if unit_ptr is None:
        anchor, f2, rest = common.unit_of(lse, factor)
        if dentropy_ptr is not None:
            dentropy = tl.load(dentropy_ptr + row).to(tl.float32)
            constant = tl.load(dlogp_ptr + row).to(tl.float32)
            constant += dentropy * tl.load(entropy_ptr + row)
            by_log = dentropy * LN2
    else:
        slope = tl.abs(tl.load(unit_ptr + row))
        finite = finite & (slope == slope)
        anchor, f2, rest = 0.0, 0.0, 0.0
    target = tl.load(target_ptr + row).to(tl.int32)
    target = tl.where(target < num_columns, target, -1)  # on another rank
    values = logits_ptr + row * stride_row, target, slope, anchor, f2, rest, constant, by_log
    return values, finite


@triton.jit
def entry_sizes(
    this,
    scale,
    columns,
    mask,
    SIGNED: tl.constexpr = False,
):
    """Return sizes times ``scale``, negative at the target; 0 where the mask is not set.

    ``SIGNED``: return the entries themselves, negated; the target is treated like the others.
    """
    values, unit_ptr, dentropy_ptr, cap_scale = this
    logits_ptr, target, slope, anchor, f2, rest, constant, by_log = values
    if unit_ptr is not None:  # the logits are E
        e = tl.load(logits_ptr + columns, mask, None if mask is None else 0.0)
        size = e.to(tl.float32) * (slope * scale)
    else:
        x = tl.load(logits_ptr + columns, mask, None if mask is None else float("-inf"))
        log2_p = tl.fma(common.bounded(x, cap_scale) - anchor, f2, -rest)
        size = tl.exp2(log2_p) * (slope * scale)
        if dentropy_ptr is not None:
            of_logs = tl.fma(tl.maximum(log2_p, common.LOG2_UNDERFLOW), by_log, constant)
            size = size * (of_logs if SIGNED else tl.abs(of_logs))
        if cap_scale is not None:  # which turns -inf into a finite value
            size = size * common.softcap_slope(x, cap_scale)
            if mask is not None:
                size = tl.where(mask, size, 0.0)
        if not SIGNED:
            size = tl.where(columns == target, -1.0, size)
    return size


def launch_for_rows(
    kernel: Any,
    tile: Tile,
    stats: RowStats,
    gradient: TileGradient | None,
    grad_stats: StatsGrad | None,
    num_warps: int,
    **arguments: object,
) -> None:
    """Launch a kernel for the rows of a tile; its logits may be overwritten by ``gradient``."""
    unit = None
    lse = stats.lse.contiguous()
    entropy = dlogp = dentropy = None
    if grad_stats is not None:
        assert gradient is None and grad_stats.dlogp is not None and grad_stats.dentropy is not None
        dlogp = grad_stats.dlogp.contiguous()
        dentropy = grad_stats.dentropy.contiguous()
        entropy = stats.entropy.contiguous()
    if gradient is not None:
        tile = tile._replace(logits=gradient.dlogits)
        unit = gradient.row_scale
    config = RowConfig(num_warps=num_warps, depth=1)
    common.launch_rows(
        kernel,
        tile,
        config,
        unit_ptr=unit,
        lse_ptr=lse,
        entropy_ptr=entropy,
        dlogp_ptr=dlogp,
        dentropy_ptr=dentropy,
        **arguments,
    )
