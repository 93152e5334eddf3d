"""A gradient times a number that only the device knows, in the dtype of its parameter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.triton.common import on_device

_BLOCK = 4096
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _scale_block(values_ptr, out_ptr, at, scale, mask):
    values = tl.load(values_ptr + at, mask=mask).to(tl.float32)
    tl.store(out_ptr + at, (values * scale).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["scale_ptr"])
def _scale_kernel(
    values_ptr,
    out_ptr,  # the same, or of another dtype
    scale_ptr,  # () of any floating dtype
    length: tl.int64,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = tl.load(scale_ptr).to(tl.float32)
    if (scale != 1.0) | (not IN_PLACE):
        first = tl.program_id(0).to(tl.int64) * BLOCK
        at = first + tl.arange(0, BLOCK)
        if first + BLOCK <= length:  # 16 bytes at once, which a mask by any length prevents
            _scale_block(values_ptr, out_ptr, at, scale, None)
        else:
            _scale_block(values_ptr, out_ptr, at, scale, at < length)


def scaled_(
    values: Tensor,  # contiguous; used up
    scale: Tensor,  # ()
    dtype: torch.dtype,
) -> Tensor:
    """Return ``values * scale``, rounded once to ``dtype``; in place where that is the dtype.

    Nothing but the scale is then read where it is 1, and the host does not wait for it.
    """
    out = values if values.dtype == dtype else torch.empty_like(values, dtype=dtype)
    length = values.numel()
    if length:
        with on_device(values):
            _scale_kernel[(triton.cdiv(length, _BLOCK),)](
                values_ptr=values,
                out_ptr=out,
                scale_ptr=scale,
                length=length,
                IN_PLACE=out is values,
                BLOCK=_BLOCK,
                **_OPTIONS,
            )
    return out
