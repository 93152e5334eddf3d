"""Gradient of a logits tile from the gradients of its row statistics, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import RowStats, StatsGrad, Tile
from grpo_kernels.backends.gpu_tiles import RowConfig, row_config
from grpo_kernels.backends.triton import common
from grpo_kernels.backends.triton.math import LN2, expm1


@triton.jit
def _weighted(y, unit, constant, of_log):
    """Return ``p (constant + of_log log2 p)`` of bounded logits."""
    anchor, f2, rest = unit
    log2_p = tl.fma(y - anchor, f2, -rest)
    factor = constant
    if of_log is not None:  # p = 0 has log p = -inf, and p log p = 0
        factor = tl.fma(tl.maximum(log2_p, common.LOG2_UNDERFLOW), of_log, constant)
    return tl.exp2(log2_p) * factor


@triton.jit
def _write_tile(
    row,
    start,
    end,
    of_log,
    cap_scale,
    BLOCK_V: tl.constexpr,
):
    """Write :func:`_weighted`, times the softcap's slope; ``end``: the row's, if within."""
    logits_ptr, out_ptr, unit, constant = row
    columns = start + tl.arange(0, BLOCK_V)
    mask = None if end is None else columns < end
    x = tl.load(logits_ptr + columns, mask, None if end is None else 0.0)
    # The stores below hit bytes that this or an earlier iteration loads, possibly in another warp:
    # no warp stores before all have loaded. Later loads are further on: outputs are never wider.
    tl.debug_barrier()
    y = common.bounded(x, cap_scale)
    dx = _weighted(y, unit, constant, of_log)
    if cap_scale is not None:
        dx = dx * (1.0 - y * y)
    tl.store(out_ptr + columns, dx.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=common.PER_ROW)
def _dlogits_kernel(
    logits_ptr,  # (C, V)
    out_ptr,  # (C, V), of the same or half the width; perhaps the same storage
    target_ptr,  # (C,) int64
    temperature_ptr,  # (C,) or None
    logprobs_ptr,  # (C,) fp32
    entropy_ptr,  # (C,) fp32, or None
    lse_ptr,  # (C,) fp64
    dlogp_ptr,  # (C,) fp32
    dentropy_ptr,  # (C,) fp32, or None
    stride_row,
    stride_out_row,
    num_columns,
    cap_scale,
    score_scale,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # for column j it is ``-p_j (dlogp + dentropy (entropy + log p_j))``, plus dlogp at the target
    if not HAS_SOFTCAP:  # still an argument: without it ptxas uses five more registers
        cap_scale = None
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_row
    out_ptr += row * stride_out_row
    target = tl.load(target_ptr + row)
    target = tl.where((target >= 0) & (target < num_columns), target, -1)  # before it is narrowed
    target = target.to(tl.int32)
    logp = tl.load(logprobs_ptr + row)
    lse = tl.load(lse_ptr + row)
    dlogp = tl.load(dlogp_ptr + row)
    factor = common.row_factor(score_scale, temperature_ptr, row)
    unit = common.unit_of(lse, factor)
    slope = factor if cap_scale is None else factor * cap_scale
    constant = -dlogp * slope
    of_log = None
    active = dlogp != 0.0
    if dentropy_ptr is not None:
        entropy = tl.load(entropy_ptr + row)
        dentropy = tl.load(dentropy_ptr + row)
        constant = -(dlogp + dentropy * entropy) * slope
        of_log = -dentropy * slope * LN2
        active = active | (dentropy != 0.0)
    this = logits_ptr, out_ptr, unit, constant
    whole = num_columns // BLOCK_V * BLOCK_V
    if active:
        inside = (target >= 0) & (target < num_columns)
        x_target = tl.load(logits_ptr + target, mask=inside, other=0.0)  # before it is overwritten
        y = common.bounded(x_target, cap_scale)
        at_target = -dlogp * expm1(logp) * slope
        if dentropy_ptr is not None:
            at_target += _weighted(y, unit, -dentropy * entropy * slope, of_log)
        if cap_scale is not None:
            at_target = at_target * (1.0 - y * y)
        for start in range(0, whole, BLOCK_V):
            _write_tile(
                row=this, start=start, end=None, of_log=of_log, cap_scale=cap_scale, BLOCK_V=BLOCK_V
            )
        if whole < num_columns:
            _write_tile(
                row=this,
                start=whole,
                end=num_columns,
                of_log=of_log,
                cap_scale=cap_scale,
                BLOCK_V=BLOCK_V,
            )
        tl.debug_barrier()  # the target's place was written by another thread
        tl.store(out_ptr + target, at_target.to(out_ptr.dtype.element_ty), mask=inside)
    else:  # a row with weight 0 gets zeros, whatever its logits
        zeros = tl.zeros((BLOCK_V,), tl.float32).to(out_ptr.dtype.element_ty)
        for start in range(0, num_columns, BLOCK_V):
            columns = start + tl.arange(0, BLOCK_V)
            tl.store(out_ptr + columns, zeros, mask=columns < num_columns)


def dlogits_(
    tile: Tile,  # fp32, bf16 or fp16
    stats: RowStats,
    grad_stats: StatsGrad,  # fp32
    out: Tensor,
    config: RowConfig | None = None,  # the table's
) -> Tensor:
    """Write the gradient of the raw logits; see :class:`Backend`."""
    logits = tile.logits
    dentropy = grad_stats.dentropy
    dlogp = torch.zeros_like(stats.logprobs) if grad_stats.dlogp is None else grad_stats.dlogp
    capped = tile.transform.softcap is not None
    config = config or row_config(logits.device)
    common.launch_rows(
        _dlogits_kernel,
        tile,
        config,
        out_ptr=out,
        logprobs_ptr=stats.logprobs.contiguous(),
        entropy_ptr=None if dentropy is None else stats.entropy.contiguous(),
        lse_ptr=stats.lse.contiguous(),
        dlogp_ptr=dlogp.contiguous(),
        dentropy_ptr=None if dentropy is None else dentropy.contiguous(),
        stride_out_row=out.stride(0),
        BLOCK_V=config.columns(logits.dtype),
        HAS_SOFTCAP=capped,
        **({} if capped else {"cap_scale": 1.0}),
    )
    return out
