"""Sums over the sequences of packed tokens: no atomics, a fixed order, fp64 accumulators."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.triton.common import OPTIONS, on_device

_BLOCK = 1024


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


def segment_sum(
    values: Tensor,  # (T,) fp32
    cu_seqlens: Tensor,  # (B + 1,) int64, starts at 0, ascending, ends at T
) -> Tensor:
    """Sum over each sequence of a packed batch, (B,), fp32; 0 for an empty one."""
    if values.dim() != 1 or values.dtype != torch.float32:
        raise ValueError(
            f"values: expected (T,) torch.float32, got {tuple(values.shape)} {values.dtype}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int64 or not cu_seqlens.numel():
        raise ValueError(
            "cu_seqlens: expected (B + 1,) torch.int64, got "
            f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    sums = values.new_empty(cu_seqlens.numel() - 1)
    if sums.numel():
        with on_device(values):
            _segment_sum_kernel[(sums.numel(),)](
                values_ptr=values.contiguous(),
                bounds_ptr=cu_seqlens.contiguous(),
                sums_ptr=sums,
                BLOCK=_BLOCK,
                **OPTIONS,
            )
    return sums
