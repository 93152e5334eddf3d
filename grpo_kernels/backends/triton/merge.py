"""Statistics of rows from sums over splits of the vocabulary, added in the splits' order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import RowStats
from grpo_kernels.backends.triton.common import (
    PER_ROW,
    pointers,
    raised,
    rebased,
    row_factor,
    softmax_results,
    store_extras,
)
from grpo_kernels.backends.triton.math import LOG2_E

_BLOCK = 128
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
# of these a new value brings no compilation
COUNTS = ["num_rows", "num_splits"]
# of each row and split; slices of one allocation, aligned as the number of rows has it
SUMS = ("peak", "total", "moment", "squares", "least")
PER_SPLIT = [*PER_ROW, *(f"{name}_ptr" for name in (*SUMS, "best"))]


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=PER_SPLIT)
def _merge_splits_kernel(
    target_ptr,  # (T,) int64
    temperature_ptr,  # (T,) or None
    y_target_ptr,  # (T,) fp32
    peak_ptr,  # (splits, T) fp32, as the next two
    total_ptr,
    moment_ptr,
    squares_ptr,  # (splits, T) fp32 or None, as the next
    least_ptr,
    best_ptr,  # (splits, T) int32 or None
    logp_ptr,  # (T,) fp32, as the other results
    entropy_ptr,
    lse_ptr,  # fp64
    is_top1_ptr,  # bool
    sum_sq_probs_ptr,
    max_logit_ptr,
    min_logit_ptr,
    num_rows,
    num_splits,
    outer,
    ROW_TEMPERATURE: tl.constexpr,
    EXTRAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    factor = row_factor(outer, temperature_ptr, tl.minimum(rows, num_rows - 1), ROW_TEMPERATURE)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float64)
    moment = tl.zeros((BLOCK,), tl.float64)
    squares = tl.zeros((BLOCK,), tl.float32)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    best = tl.zeros((BLOCK,), tl.int32)
    at = rows
    for _ in range(0, num_splits):
        its_peak = tl.load(peak_ptr + at, mask=mask, other=0.0)
        its_total = tl.load(total_ptr + at, mask=mask, other=1.0)
        its_moment = tl.load(moment_ptr + at, mask=mask, other=0.0)
        its_squares = its_total
        if EXTRAS:
            its_squares = tl.load(squares_ptr + at, mask=mask, other=0.0)
        f2 = factor * LOG2_E
        new_peak, base, total, moment, squares = raised(peak, total, moment, squares, its_peak, f2)
        more = rebased(its_peak, its_total, its_moment, its_squares, base, f2)
        total, moment, squares = total + more[0], moment + more[1], squares + more[2]
        if EXTRAS:
            least = tl.minimum(least, tl.load(least_ptr + at, mask=mask, other=0.0))
            best = tl.where(its_peak > peak, tl.load(best_ptr + at, mask=mask, other=0), best)
        peak = new_peak
        at += num_rows

    y_target = tl.load(y_target_ptr + rows, mask=mask, other=0.0)
    logp, entropy, lse = softmax_results(y_target, peak, factor, total, moment.to(tl.float32))
    tl.store(logp_ptr + rows, logp, mask=mask)
    tl.store(entropy_ptr + rows, entropy, mask=mask)
    tl.store(lse_ptr + rows, lse, mask=mask)
    if EXTRAS:
        is_top1 = tl.load(target_ptr + rows, mask=mask, other=0).to(tl.int32) == best
        store_extras(
            rows, mask, total, squares, is_top1, peak * factor, least * factor,
            is_top1_ptr, sum_sq_probs_ptr, max_logit_ptr, min_logit_ptr,
        )  # fmt: skip


def merge_splits(
    target: Tensor,  # (T,) int64
    y_target: Tensor,  # (T,) fp32
    partials: dict[str, Tensor | None],  # (splits, T) each, by the kernels' names
    transform: dict[str, object],  # of ``transform_arguments``
    stats: RowStats,  # (T,) each, filled
) -> None:
    peak = partials["peak_ptr"]
    assert peak is not None
    splits, rows = peak.shape
    names = ("temperature_ptr", "outer", "ROW_TEMPERATURE")
    _merge_splits_kernel[(triton.cdiv(rows, _BLOCK),)](
        target_ptr=target,
        y_target_ptr=y_target,
        num_rows=rows,
        num_splits=splits,
        EXTRAS=stats.is_top1 is not None,
        BLOCK=_BLOCK,
        **partials,
        **{name: transform[name] for name in names},
        **pointers(stats),
        **_OPTIONS,
    )
