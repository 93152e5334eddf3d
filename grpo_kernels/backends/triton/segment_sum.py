"""Deterministic sums over packed tokens: no atomics, a fixed order, fp64 accumulators."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.triton.common import on_device

_BLOCK = 1024
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _weighted_partials_kernel(
    values_ptr,  # (T,) fp32
    weights_ptr,  # (T,) fp32
    partials_ptr,  # (programs,) fp64
    length,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    offs_t = program * BLOCK + tl.arange(0, BLOCK)
    mask_t = offs_t < length
    values = tl.load(values_ptr + offs_t, mask=mask_t, other=0.0).to(tl.float64)
    weights = tl.load(weights_ptr + offs_t, mask=mask_t, other=0.0).to(tl.float64)
    tl.store(partials_ptr + program, tl.sum(values * weights, axis=0))


@triton.jit
def _segment_sum_kernel(
    values_ptr,  # (T,) fp32 or fp64
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


def weighted_sum(
    values: Tensor,  # (T,) fp32
    weights: Tensor,  # (T,) fp32
) -> Tensor:
    """Return ``sum_t values_t weights_t``, () fp32. The same inputs give the same bits."""
    _check_vector("values", values)
    _check_vector("weights", weights)
    if values.shape != weights.shape:
        raise ValueError(f"weights: expected {tuple(values.shape)}, got {tuple(weights.shape)}")
    length = values.numel()
    programs = triton.cdiv(length, _BLOCK)
    partials = torch.empty(programs, dtype=torch.float64, device=values.device)
    if length:
        with on_device(values):
            _weighted_partials_kernel[(programs,)](
                values_ptr=values.contiguous(),
                weights_ptr=weights.contiguous(),
                partials_ptr=partials,
                length=length,
                BLOCK=_BLOCK,
                **_OPTIONS,
            )
    bounds = torch.zeros(2, dtype=torch.int64, device=values.device)
    bounds[1:].fill_(programs)
    return _launch_segments(partials, bounds)[0]


def segment_sum(
    values: Tensor,  # (T,) fp32
    cu_seqlens: Tensor,  # (B + 1,) int64, starts at 0, ascending, ends at T
) -> Tensor:
    """Sum over each sequence of a packed batch, (B,), fp32; 0 for an empty one."""
    _check_vector("values", values)
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int64 or not cu_seqlens.numel():
        raise ValueError(
            "cu_seqlens: expected (B + 1,) torch.int64, got "
            f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    return _launch_segments(values.contiguous(), cu_seqlens.contiguous())


def _launch_segments(values: Tensor, bounds: Tensor) -> Tensor:
    segments = bounds.numel() - 1
    sums = torch.empty(segments, dtype=torch.float32, device=values.device)
    if segments:
        with on_device(values):
            _segment_sum_kernel[(segments,)](
                values_ptr=values,
                bounds_ptr=bounds,
                sums_ptr=sums,
                BLOCK=_BLOCK,
                **_OPTIONS,
            )
    return sums


def _check_vector(name: str, value: Tensor) -> None:
    if value.dim() != 1 or value.dtype != torch.float32:
        raise ValueError(
            f"{name}: expected (T,) torch.float32, got {tuple(value.shape)} {value.dtype}"
        )
