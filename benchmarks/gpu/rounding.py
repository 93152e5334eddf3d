"""A kernel that rounds a tensor times a factor which is on the device, 16 bytes a thread."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

_BLOCK, _WARPS = 4096, 8


@triton.jit
def as_bf16(x, UPCAST: tl.constexpr):
    """Round to nearest, ties to even; with ``UPCAST`` by hand: Triton's interpreter truncates."""
    if UPCAST:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & -0x10000).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def _round_scaled_kernel(
    x_ptr,  # fp32 or bf16
    out_ptr,  # bf16
    scale_ptr,  # () fp32
    size,
    UPCAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, as_bf16(x * tl.load(scale_ptr), UPCAST), mask=mask)


def round_scaled(
    x: Tensor,  # fp32 or bf16, contiguous
    scale: Tensor,  # () fp32
    out: Tensor,  # bf16, as x; may be x
) -> Tensor:
    """Write ``x`` times ``scale`` to ``out``."""
    assert x.is_contiguous() and out.is_contiguous() and out.dtype == torch.bfloat16
    _round_scaled_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
        x_ptr=x,
        out_ptr=out,
        scale_ptr=scale,
        size=x.numel(),
        UPCAST=bool(knobs.runtime.interpret),
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return out
