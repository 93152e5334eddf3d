"""Device functions that Triton kernels share. Interpretable: built from Triton's own operations."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# ln 2 in two parts; the first has so few bits that its product with an exponent is exact
_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(-2.12194440054690583e-4)


@triton.jit
def precise_exp(x):
    """Compute exp to about 2 ulp for any fp32 ``x``; the hardware's loses ``|x|`` ulp."""
    # the result is 0 or inf well inside these limits
    x = tl.maximum(x, -120.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 120.0, propagate_nan=tl.PropagateNan.ALL)
    n = tl.floor(x * LOG2_E + 0.5)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    # two factors: 2**n by itself could overflow though 2**n exp(r) does not
    half = tl.floor(n * 0.5)
    return tl.exp(r) * tl.exp2(half) * tl.exp2(n - half)


@triton.jit
def log1p(x):
    """Compute log(1 + x), also near 0 (Kahan): the rounding error of 1 + x is divided out."""
    shifted = 1.0 + x
    # special cases: 1 + x is 1, inf or NaN; 1 + x = 0 gives -inf by the quotient
    plain = (shifted == 1.0) | (shifted == float("inf"))
    safe = tl.where(plain, 2.0, shifted)
    return tl.where(plain, x, tl.log(safe) * tl.div_rn(x, safe - 1.0))


@triton.jit
def expm1(x):
    """Compute exp(x) - 1, also near 0, for ``x`` of at most 1."""
    half = tanh(0.5 * x)
    return 2.0 * half / (1.0 - half)


@triton.jit
def tanh(x):
    """Compute tanh of fp32 ``x`` to about 4 ulp, also near 0; NaN stays NaN."""
    # where 1 - 2 / (exp(2x) + 1) cancels, a polynomial with minimax relative error on [0, 0.5]
    square = x * x
    poly = 0.0213017031 + square * -0.00665357197
    poly = -0.0538999715 + square * poly
    poly = 0.133329707 + square * poly
    poly = -0.33333327 + square * poly
    small = x + x * square * poly
    large = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    large = tl.where(x < 0, -large, large)
    return tl.where(tl.abs(x) < 0.5, small, large)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round fp32 ``x`` to ``DTYPE``, to nearest even."""
    if INTERPRETED and DTYPE.is_bf16():  # Triton's interpreter truncates
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, (bits & -0x10000).to(tl.float32, bitcast=True), float("nan"))
    return x.to(DTYPE)
