"""Statistics of a row, a caller's function of them and the gradient of its logits, in one kernel.

The row is read once, for its statistics and for :mod:`exponentials`; where these do not serve, it
is read once more for its gradient. In between runs the caller's device function, which knows what
the statistics are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import RowStats, Tile, TileGradient
from grpo_kernels.backends.configs import RowConfig, row_config, rows_are_aligned
from grpo_kernels.backends.triton.common import (
    PER_ROW,
    check_tile,
    empty_stats,
    launching,
    row_factor,
    transform_arguments,
)
from grpo_kernels.backends.triton.dlogits import gradient_view, write_gradient
from grpo_kernels.backends.triton.exponentials import finish_exponentials
from grpo_kernels.backends.triton.row_stats import write_statistics

MAX_VALUES = 7
_VALUES = [f"value{index}_ptr" for index in range(MAX_VALUES)]


@triton.jit
def _value(value_ptr, row):
    """Load a value as a vector of one, which generated functions work on; 0 for None."""
    if value_ptr is None:
        value = tl.zeros((1,), tl.float32)
    else:
        value = tl.load(value_ptr + row + tl.arange(0, 1))
    return value


@triton.jit(
    # rows of the gradient may be aligned where those of the logits are not: the statistics would
    # be added up in another order than without a loss
    do_not_specialize=["stride_out_row"],
    do_not_specialize_on_alignment=[*PER_ROW, *_VALUES, "each_ptr", "factor_ptr"],
)
def _row_loss_kernel(
    logits_ptr,  # (C, V)
    out_ptr,  # (C, V), the same storage, of the same or half the width
    target_ptr,  # (C,) int64
    temperature_ptr,  # (C,) or None
    value0_ptr,  # (C,) fp32 or None, as the others: further arguments of FUNCTION
    value1_ptr,
    value2_ptr,
    value3_ptr,
    value4_ptr,
    value5_ptr,
    value6_ptr,
    logp_ptr,  # (C,) fp32, as the other results
    entropy_ptr,
    lse_ptr,  # fp64
    each_ptr,
    factor_ptr,  # of the gradient's rows, or None: they get their gradient itself
    stride_row,
    stride_out_row,
    num_columns,
    inner,
    outer,
    FUNCTION: tl.constexpr,  # (logp, entropy, 6 values, 1) -> what it adds to the loss, dlogp, ...
    HAS_DENTROPY: tl.constexpr,  # ... dentropy
    HAS_SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_row
    if VECTOR > 1:
        stride_out_row = tl.multiple_of(stride_out_row, 16)
    out_ptr += row * stride_out_row
    exponentials_ptr = out_ptr
    if factor_ptr is None:
        exponentials_ptr = None
    factor = row_factor(outer, temperature_ptr, row, ROW_TEMPERATURE)
    target = tl.load(target_ptr + row).to(tl.int32)
    x_target = tl.load(logits_ptr + target)
    logp, entropy, lse, _, sums = write_statistics(
        logits_ptr, exponentials_ptr, row, target, factor, logp_ptr, entropy_ptr, lse_ptr,
        num_columns, inner, HAS_SOFTCAP, False, BLOCK_V, THREADS, VECTOR,
    )  # fmt: skip

    single = tl.zeros((1,), tl.float32)
    results = FUNCTION(
        single + logp, single + entropy,
        _value(value0_ptr, row), _value(value1_ptr, row), _value(value2_ptr, row),
        _value(value3_ptr, row), _value(value4_ptr, row), _value(value5_ptr, row),
        _value(value6_ptr, row), 1,
    )  # fmt: skip
    tl.store(each_ptr + row, tl.sum(results[0], axis=0))
    dentropy = 0.0
    if HAS_DENTROPY:
        dentropy = tl.sum(results[2], axis=0)
    dlogp = tl.sum(results[1], axis=0)
    if factor_ptr is not None:
        log_total = tl.log(sums[1].to(tl.float32))
        log_anchor = (sums[6] - sums[0]) * factor - log_total  # its score less lse
        of_row = finish_exponentials(
            out_ptr, x_target, target, num_columns, logp, log_anchor, dlogp, inner, factor,
            HAS_SOFTCAP, BLOCK_V,
        )  # fmt: skip
        tl.store(factor_ptr + row, of_row)
    else:
        write_gradient(
            logits_ptr, out_ptr, num_columns, target, logp, entropy, lse, dlogp, dentropy,
            inner, factor, HAS_DENTROPY, HAS_SOFTCAP, BLOCK_V,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RowFunction:
    """A device function of a row's statistics and of further values."""

    device_function: Any  # (logp, entropy, values..., BLOCK) -> (each, dlogp[, dentropy])
    has_dentropy: bool


def row_loss_(
    tile: Tile,  # fp32, bf16 or fp16, with all targets; overwritten
    function: RowFunction,
    values: Sequence[Tensor | None],  # (C,) fp32 each; ``MAX_VALUES`` of them
    out_dtype: torch.dtype,
    config: RowConfig | None = None,  # the table's
) -> tuple[RowStats, Tensor, TileGradient]:
    """Return statistics, what each row adds to the loss (C,), and the gradient of the logits, in
    their storage."""
    check_tile(tile)
    logits, target, transform = tile
    out = gradient_view(logits, out_dtype)
    rows, columns = logits.shape
    stats = empty_stats(rows, logits.device, extras=False)
    each = torch.empty_like(stats.logp)
    one_read = out_dtype == torch.bfloat16 and not function.has_dentropy
    factor = torch.empty_like(stats.logp) if one_read else None
    if rows:
        config = config or row_config("loss", logits.dtype, columns, logits.device)
        contiguous = (x if x is None else x.contiguous() for x in values)
        with launching(config, logits):
            _row_loss_kernel[(rows,)](
                logits_ptr=logits,
                out_ptr=out,
                target_ptr=target.contiguous(),
                **dict(zip(_VALUES, contiguous, strict=True)),
                logp_ptr=stats.logp,
                entropy_ptr=stats.entropy,
                lse_ptr=stats.lse,
                each_ptr=each,
                factor_ptr=factor,
                stride_row=logits.stride(0),
                stride_out_row=out.stride(0),
                num_columns=columns,
                FUNCTION=function.device_function,
                HAS_DENTROPY=function.has_dentropy,
                **config.blocks(logits.dtype, rows_are_aligned(logits)),
                **config.options,
                **transform_arguments(transform, logits),
            )
    return stats, each, TileGradient(out, factor)
