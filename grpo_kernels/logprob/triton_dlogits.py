"""Gradient of a logits tile from the gradients of its row statistics, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.logprob.rows import RowStats, Transform, output_view
from grpo_kernels.logprob.tiles import RowConfig, row_config
from grpo_kernels.logprob.triton_common import (
    PER_ROW,
    check_tile,
    on_device,
    row_factor,
    scores,
    transform_arguments,
)
from grpo_kernels.triton_math import tanh


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _dlogits_kernel(
    logits_ptr,  # (C, V)
    out_ptr,  # (C, V), the same storage, of the same or half the width
    target_ptr,  # (C,) int64
    temperature_ptr,  # (C,) or None
    logp_ptr,  # (C,) fp32, as the next four
    entropy_ptr,
    lse_ptr,
    dlogp_ptr,
    dentropy_ptr,  # or None
    stride_row,
    stride_out_row,
    num_columns,
    inner,
    outer,
    HAS_DENTROPY: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_row
    out_ptr += row * stride_out_row
    factor = row_factor(outer, temperature_ptr, row, ROW_TEMPERATURE)
    target = tl.load(target_ptr + row).to(tl.int32)
    logp = tl.load(logp_ptr + row)
    lse = tl.load(lse_ptr + row)
    dlogp = tl.load(dlogp_ptr + row)
    active = dlogp != 0.0
    if HAS_DENTROPY:
        entropy = tl.load(entropy_ptr + row)
        dentropy = tl.load(dentropy_ptr + row)
        active = active | (dentropy != 0.0)
    # a row without weight is not even read, so what it holds cannot leak into its zeros
    num_active = tl.where(active, num_columns, 0)

    # log p_j = z_j - lse = (z_j - z_y) + logp. The subtrahend is rounded to its own magnitude, so
    # the smaller one is the more accurate: logits that carry a large offset cost no digits.
    near = tl.abs(logp) < tl.abs(lse)
    z_target = scores(tl.load(logits_ptr + target), inner, factor, HAS_SOFTCAP)
    anchor = tl.where(near, z_target, lse)
    shift = tl.where(near, logp, 0.0)

    offs_v = tl.arange(0, BLOCK_V)
    for start in range(0, num_columns, BLOCK_V):
        columns = start + offs_v
        mask_active = columns < num_active
        x = tl.load(logits_ptr + columns, mask=mask_active, other=0.0)
        # The stores below hit bytes that this or an earlier iteration loads (z_target, too), and
        # not always in the warp that loaded them. No warp stores before all have loaded. A later
        # iteration's loads lie behind this iteration's stores: an output is never wider.
        tl.debug_barrier()
        logq = (scores(x, inner, factor, HAS_SOFTCAP) - anchor) + shift
        p = tl.exp(logq)
        dz = dlogp * (tl.where(columns == target, 1.0, 0.0) - p)
        if HAS_DENTROPY:
            # p = 0 has log p = -inf, and p log p = 0
            dz -= dentropy * p * tl.where(p == 0.0, 0.0, logq + entropy)
        slope = factor
        if HAS_SOFTCAP:
            bounded = tanh(x.to(tl.float32) * inner)
            slope = factor * inner * (1.0 - bounded * bounded)
        dx = tl.where(mask_active, dz * slope, 0.0)
        tl.store(out_ptr + columns, dx.to(out_ptr.dtype.element_ty), mask=columns < num_columns)


def dlogits_(
    logits: Tensor,  # (C, V) fp32, bf16 or fp16, columns contiguous; overwritten
    target: Tensor,  # (C,) int64 in [0, V)
    transform: Transform,
    stats: RowStats,
    dlogp: Tensor,  # (C,) fp32
    dentropy: Tensor | None,  # (C,) fp32
    out_dtype: torch.dtype,
    config: RowConfig | None = None,  # the table's
) -> Tensor:
    """Gradient with respect to the raw logits, in their storage; see :class:`RowKernels`."""
    check_tile(logits, target)
    half_of_fp32 = logits.dtype == torch.float32 and out_dtype.itemsize == 2
    if out_dtype != logits.dtype and not half_of_fp32:
        raise ValueError(
            f"out_dtype: expected {logits.dtype} or, for fp32 logits, a 16-bit dtype; "
            f"got {out_dtype}"
        )
    out = output_view(logits, out_dtype)
    rows, columns = logits.shape
    if rows:
        config = config or row_config("dlogits", logits.dtype, columns, logits.device)
        with on_device(logits):
            _dlogits_kernel[(rows,)](
                logits_ptr=logits,
                out_ptr=out,
                target_ptr=target.contiguous(),
                logp_ptr=stats.logp.contiguous(),
                entropy_ptr=stats.entropy.contiguous(),
                lse_ptr=stats.lse.contiguous(),
                dlogp_ptr=dlogp.contiguous(),
                dentropy_ptr=None if dentropy is None else dentropy.contiguous(),
                stride_row=logits.stride(0),
                stride_out_row=out.stride(0),
                num_columns=columns,
                HAS_DENTROPY=dentropy is not None,
                BLOCK_V=config.columns(logits.dtype),
                **config.options,
                **transform_arguments(transform, logits),
            )
    return out
