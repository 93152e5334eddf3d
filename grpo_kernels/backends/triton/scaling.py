"""A gradient times the gradient of the loss, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from grpo_kernels.backends.triton.common import OPTIONS
from grpo_kernels.backends.triton.math import rounded

_BLOCK = 2048  # elements of a program


@triton.jit
def _scale_block(
    x_ptr,
    out_ptr,
    mask,
    scale,
    INTERPRETED: tl.constexpr,
):
    """Scale elements, starting at two addresses."""
    x = tl.load(x_ptr, mask).to(tl.float32)
    tl.store(out_ptr, rounded(x * scale, out_ptr.dtype.element_ty, INTERPRETED), mask)


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["scale_ptr"])
def _scale_kernel(
    x_ptr,  # (length,)
    scale_ptr,  # ()
    out_ptr,  # (length,), perhaps the same storage
    length: tl.int64,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = tl.load(scale_ptr).to(tl.float32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offs = tl.arange(0, BLOCK)
    if start + BLOCK <= length:  # no mask, so that 16 bytes are loaded and stored at once
        _scale_block(
            x_ptr=x_ptr + start + offs,
            out_ptr=out_ptr + start + offs,
            mask=None,
            scale=scale,
            INTERPRETED=INTERPRETED,
        )
    else:
        mask = start + offs < length
        _scale_block(
            x_ptr=x_ptr + start + offs,
            out_ptr=out_ptr + start + offs,
            mask=mask,
            scale=scale,
            INTERPRETED=INTERPRETED,
        )


def scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a gradient by a () scale; see :class:`Backend`."""
    assert gradient.is_contiguous() and scale.numel() == 1, (gradient.stride(), scale.shape)
    in_place = gradient.dtype == dtype
    if in_place and dtype.itemsize > 2:  # torch is as fast where nothing is rounded
        return gradient.mul_(scale)
    out = gradient if in_place else torch.empty_like(gradient, dtype=dtype)
    if length := gradient.numel():
        with torch.cuda.device_of(gradient):
            _scale_kernel[(triton.cdiv(length, _BLOCK),)](
                x_ptr=gradient,
                scale_ptr=scale,
                out_ptr=out,
                length=length,
                INTERPRETED=knobs.runtime.interpret,
                BLOCK=_BLOCK,
                **OPTIONS,
            )
    return out
