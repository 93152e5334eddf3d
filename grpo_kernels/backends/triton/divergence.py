"""Divergence of a tile of a student's logits from a teacher's, and its gradient, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import LEAST_LOGP
from grpo_kernels.backends.divergence import Divergence, Pair
from grpo_kernels.backends.gpu_tiles import RowConfig, row_config
from grpo_kernels.backends.triton import common
from grpo_kernels.backends.triton.math import LN2, expm1, log1p

_LEAST_LOG2_P = tl.constexpr(LEAST_LOGP * 1.4426950408889634)
_FORWARD_KL, _REVERSE_KL = (
    tl.constexpr(Divergence(kind=kind).index) for kind in ("forward_kl", "reverse_kl")
)
_PER_ROW = [*common.PER_ROW, "teacher_lse_ptr", "teacher_temperature_ptr", "sums_ptr"]
_PER_ROW += ["logp_grad_sum_ptr", "coefficient_ptr"]


@triton.jit
def _log2_p(y, unit):
    """Return log2 of the probabilities of bounded logits."""
    anchor, f2, rest = unit
    log2_p = tl.fma(y - anchor, f2, -rest)
    return tl.maximum(log2_p, _LEAST_LOG2_P, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _terms(log2_s, log2_t, beta, KIND: tl.constexpr):
    """Return s, the ids' terms of the divergence, and ``logp_grad``; see ``Divergence.terms``."""
    s = tl.exp2(log2_s)
    t = tl.exp2(log2_t)
    delta = (log2_t - log2_s) * LN2
    if KIND == _FORWARD_KL:
        each = t * delta
        logp_grad = -t
    elif KIND == _REVERSE_KL:
        each = -s * delta
        logp_grad = each
    else:
        size = tl.abs(delta)
        below = -log1p(tl.where(delta > 0, 1.0 - beta, beta) * expm1(-size))
        logp_grad = (1.0 - beta) * s * (below - tl.where(delta > 0, size, 0.0))
        each = logp_grad + beta * t * (below - tl.where(delta > 0, 0.0, size))
    return s, each, logp_grad


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _divergence_kernel(
    logits_ptr,  # (C, V)
    teacher_ptr,  # (C, V)
    target_ptr,  # not read
    temperature_ptr,  # (C,) or None
    teacher_temperature_ptr,
    lse_ptr,  # (C,) fp64
    teacher_lse_ptr,
    sums_ptr,  # (2, C) fp64; None: compute the gradient
    logp_grad_sum_ptr,  # (C,) fp64
    coefficient_ptr,  # (C,) fp32
    out_ptr,  # (C, V), of the same or half the width; perhaps the same storage
    stride_row,
    stride_teacher_row,
    stride_out_row,
    num_rows,
    num_columns,
    cap_scale,  # or None, like the next
    teacher_cap_scale,
    score_scale,
    teacher_score_scale,
    beta,
    KIND: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_row
    teacher_ptr += row * stride_teacher_row
    beta = tl.cast(beta, tl.float32)
    factor = common.row_factor(score_scale, temperature_ptr, row)
    teacher_factor = common.row_factor(teacher_score_scale, teacher_temperature_ptr, row)
    unit = common.unit_of(tl.load(lse_ptr + row), factor)
    teacher_unit = common.unit_of(tl.load(teacher_lse_ptr + row), teacher_factor)
    if sums_ptr is not None:
        all_each = tl.zeros((BLOCK_V,), tl.float32)
        all_logp_grad = tl.zeros((BLOCK_V,), tl.float32)
        for start in range(0, num_columns, BLOCK_V):
            columns = start + tl.arange(0, BLOCK_V)
            mask = columns < num_columns
            y = common.bounded(tl.load(logits_ptr + columns, mask, 0.0), cap_scale)
            y_teacher = common.bounded(tl.load(teacher_ptr + columns, mask, 0.0), teacher_cap_scale)
            log2_s = _log2_p(y, unit)
            log2_t = _log2_p(y_teacher, teacher_unit)
            s, each, logp_grad = _terms(log2_s, log2_t, beta, KIND)
            all_each += tl.where(mask, each, 0.0)
            all_logp_grad += tl.where(mask, logp_grad, 0.0)
        tl.store(sums_ptr + row, tl.sum(all_each.to(tl.float64)))
        tl.store(sums_ptr + num_rows + row, tl.sum(all_logp_grad.to(tl.float64)))
    else:
        out_ptr += row * stride_out_row
        total = tl.load(logp_grad_sum_ptr + row).to(tl.float32)
        coefficient = tl.load(coefficient_ptr + row)
        slope = coefficient * (factor if cap_scale is None else factor * cap_scale)
        for start in range(0, num_columns, BLOCK_V):
            columns = start + tl.arange(0, BLOCK_V)
            mask = columns < num_columns
            x = tl.load(logits_ptr + columns, mask, 0.0)
            x_teacher = tl.load(teacher_ptr + columns, mask, 0.0)
            # another warp may still read here what is stored below: see dlogits.py
            tl.debug_barrier()
            y = common.bounded(x, cap_scale)
            y_teacher = common.bounded(x_teacher, teacher_cap_scale)
            log2_s = _log2_p(y, unit)
            log2_t = _log2_p(y_teacher, teacher_unit)
            s, each, logp_grad = _terms(log2_s, log2_t, beta, KIND)
            dx = (logp_grad - s * total) * slope
            if cap_scale is not None:
                dx = dx * (1.0 - y * y)
            dx = tl.where(coefficient == 0.0, 0.0, dx)  # for a row with weight 0, even if NaN
            tl.store(out_ptr + columns, dx.to(out_ptr.dtype.element_ty), mask=mask)


def divergence_sums(pair: Pair, divergence: Divergence, config: RowConfig | None = None) -> Tensor:
    """Return (2, C) in fp64; see :class:`Backend`."""
    sums = torch.empty((2, len(pair.lse)), dtype=torch.float64, device=pair.lse.device)
    none = dict.fromkeys(("logp_grad_sum_ptr", "coefficient_ptr", "out_ptr"))
    _launch(pair, divergence, config, sums_ptr=sums, stride_out_row=0, **none)
    return sums


def divergence_gradient_(
    pair: Pair,
    divergence: Divergence,
    logp_grad_sum: Tensor,
    coefficient: Tensor,
    out: Tensor,
    config: RowConfig | None = None,
) -> Tensor:
    """Write the gradient of the student's raw logits; see :class:`Backend`."""
    vectors = {
        "logp_grad_sum_ptr": logp_grad_sum.contiguous(),
        "coefficient_ptr": coefficient.contiguous(),
    }
    results = {"sums_ptr": None, "out_ptr": out, "stride_out_row": out.stride(0)}
    _launch(pair, divergence, config, **results, **vectors)
    return out


def _launch(
    pair: Pair, divergence: Divergence, config: RowConfig | None, **results: object
) -> None:
    student, teacher, lse, teacher_lse = pair
    assert student.logits.shape == teacher.logits.shape, teacher.logits.shape
    of_teacher = common.transform_arguments(teacher.transform, teacher.logits)
    config = config or row_config(student.logits.device)
    common.launch_rows(
        _divergence_kernel,
        student,
        config,
        teacher_ptr=teacher.logits,
        stride_teacher_row=teacher.logits.stride(0),
        lse_ptr=lse.contiguous(),
        teacher_lse_ptr=teacher_lse.contiguous(),
        num_rows=len(lse),
        beta=divergence.beta,
        KIND=divergence.index,
        BLOCK_V=config.columns(student.logits.dtype),
        **{f"teacher_{name}": value for name, value in of_teacher.items()},
        **results,
    )
