"""The gradient of a row of logits in one read of it: anchored exponentials times one number.

The gradient of row i is ``-dlogp_i p_ij`` but for the target, and ``p_ij = exp(z_ij - a_i)
exp(a_i - lse_i)`` for any anchor a_i. So ``E_ij = exp(z_ij - a_i)`` can be written over the logits
on the way, while the row's statistics are summed; what the loss says comes later, as one number r_i
per row. The GEMMs take it out of the sums: ``dhidden = r (E W)``, ``dweight = E^T (r h)``.

The anchor is the target's score, so that ``E`` holds a target's rivals however rare they are. Where
the row turns out to be far above, the anchor rises, and what was written follows. 16-bit numbers
with the range of fp32 (bf16) hold all of that; fp16 does not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grpo_kernels.backends.triton.common import softcap_slope, spread
from grpo_kernels.backends.triton.math import expm1

# How far, in nats, scores may lie above the anchor: E up to 3e10, and a factor that is no smaller
# than 1e-16 of the gradient.
_REACH = tl.constexpr(24.0)
_LOWEST = tl.constexpr(-1e30)  # an anchor for a target without a finite score


@triton.jit
def first_anchor(y_target):
    """Return the anchor of a row before it is read, as a bounded logit."""
    return tl.where(y_target > _LOWEST, y_target, _LOWEST)


@triton.jit
def raised_anchor(
    out_ptr,
    anchor,
    tile_peak,  # (threads,)
    factor,
    offs_v,  # (depth, threads, vector)
    start,
    BLOCK_V: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Return an anchor that suits a tile with this peak, and rewrite the tiles before it."""
    top = tl.max(tile_peak, axis=0)
    if (top - anchor) * factor > _REACH:
        shrink = tl.exp((anchor - top) * factor)
        tl.debug_barrier()  # other threads may have written what this one reads
        for earlier in range(0, start, BLOCK_V):
            # as many at once as it loads logits: more would spread the lanes over the warps
            at = out_ptr + tl.max_contiguous(earlier + offs_v, (1, 1, VECTOR))
            tl.store(at, (tl.load(at).to(tl.float32) * shrink).to(out_ptr.dtype.element_ty))
        anchor = top
    return anchor


@triton.jit
def store_exponentials(
    out_ptr,
    columns,
    mask_v,
    x,  # raw logits (depth, threads, vector)
    e,  # exp(z - base)
    peak,  # (threads,) -inf in those that have seen nothing
    base,
    anchor,
    f2,
    inner,
    HAS_SOFTCAP: tl.constexpr,
):
    """Store a tile of ``E``, times the slope of the softcap, over the logits."""
    lift = tl.where(peak == float("-inf"), 0.0, tl.exp2((base - anchor) * f2))
    e = e * spread(lift, e)
    if HAS_SOFTCAP:
        e = e * softcap_slope(x, inner)
    tl.store(out_ptr + columns, e.to(out_ptr.dtype.element_ty), mask=mask_v)


@triton.jit
def finish_exponentials(
    out_ptr,  # of one row
    x_target,  # the raw logit
    target,
    num_columns,
    logp,
    log_anchor,  # anchor - lse
    inner,
    factor,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Complete ``E`` at the target, and return what the row's dlogp is multiplied by.

    A row that holds infinities or NaNs becomes zeros and this NaN: without a weight the row then
    adds nothing, and with one it shows.
    """
    slope = factor
    at_target = expm1(logp) * tl.exp(-log_anchor)
    if HAS_SOFTCAP:
        slope = factor * inner
        at_target = at_target * softcap_slope(x_target, inner)
    finite = (log_anchor - log_anchor == 0.0) & (logp - logp == 0.0)
    tl.debug_barrier()  # the target's place was written by another thread
    if finite:
        tl.store(out_ptr + target, at_target.to(out_ptr.dtype.element_ty))
    else:
        for start in range(0, num_columns, BLOCK_V):
            columns = start + tl.arange(0, BLOCK_V)
            zeros = tl.zeros((BLOCK_V,), tl.float32).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + columns, zeros, mask=columns < num_columns)
    return tl.where(finite, -slope * tl.exp(log_anchor), float("nan"))
