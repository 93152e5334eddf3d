"""Log-probabilities without a gradient: softmax statistics in the epilogue of the logits GEMM.

A program owns a block of rows and a split of the vocabulary. It computes one tile of fp32 logits
after another and folds each into the sums of its rows, so that logits never leave the chip. A
second kernel merges the splits in order. The splits depend only on the head, so a row's bits are
the same in every batch.

A tile is folded in two subtiles if it would not fit into the registers next to its temporaries.
With extras, a tile is a single subtile, folded in the same order. If threads hold both in the same
layout (Hopper and Blackwell: `tests/gpu/test_bits.py`), the other statistics keep their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from grpo_kernels.backends.base import RowStats, empty_stats
from grpo_kernels.backends.gpu_tiles import LinearConfig, linear_config, row_stride
from grpo_kernels.backends.triton import common
from grpo_kernels.backends.triton.linear_tile import (
    block_and_split,
    constants,
    described,
    logits_tile,
    operands,
)
from grpo_kernels.backends.triton.math import LOG2_E, rounded
from grpo_kernels.head import Head, logits_dtype

_NO_COLUMN = tl.constexpr(2**31 - 1)
# Nats by which a row's sum of E may exceed its anchor, 2**80: the reciprocal, times gradients of
# losses and hidden states, keeps all digits of bf16.
_REACH = tl.constexpr(55.0)
_MERGED_ROWS = 128  # by one program
_ROUNDED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# limit on the sums of the splits; longer batches are launched in chunks
_PARTIAL_BYTES = 32 << 20
_CHUNK_ROWS = 2048  # or a multiple
_COUNTS = ["num_rows", "num_splits"]  # new values of these do not recompile
_PER_SPLIT = [*common.PER_ROW, "sums_ptr", "best_ptr"]


@triton.jit
def _fold(
    y,
    columns,
    mask_v,
    f2,
    sums,
    EXTRAS: tl.constexpr,
):
    """Add bounded logits (rows, columns) to sums of rows; ``best``: the peak's first column."""
    peak, total, moment, squares, least, best = sums
    its_peak = tl.max(y, axis=1)
    new_peak, base, total, moment, squares = common.raised(
        peak=peak, total=total, moment=moment, squares=squares, other_peak=its_peak, f2=f2
    )
    if EXTRAS:
        least = tl.minimum(least, tl.min(tl.where(mask_v[None, :], y, float("inf")), axis=1))
        at_peak = tl.where(y == its_peak[:, None], columns[None, :], _NO_COLUMN)
        best = tl.where(its_peak > peak, tl.min(at_peak, axis=1), best)
    total, moment, squares, _ = common.folded(
        y=y, base=base, total=total, moment=moment, squares=squares, f2=f2, EXTRAS=EXTRAS
    )
    return new_peak, total, moment, squares, least, best


@triton.jit
def overflowed(
    sums_ptr,
    split,
    rows,
    mask,
    num_rows,
    num_splits,
):
    """Return which rows have a sum in this split that is not finite."""
    at = split.to(tl.int64) * num_rows + rows
    size = tl.cast(num_splits, tl.int64) * num_rows
    both = tl.load(sums_ptr + size + at, mask=mask, other=0.0)
    both += tl.load(sums_ptr + 2 * size + at, mask=mask, other=0.0)
    return both - both != 0.0


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_PER_SPLIT)
def linear_stats_kernel(
    x_ptr,  # (T, D), contiguous, or its descriptor
    weight_ptr,  # (V, D), or its descriptor
    bias_ptr,  # (V,) or None
    target_ptr,  # (T,) int64
    temperature_ptr,  # (T,) or None
    y_target_ptr,  # (T,) fp32, the target's bounded logit
    sums_ptr,  # (3 or, with ``best_ptr``, 5, splits, T) fp32, those of :func:`_fold` in order
    best_ptr,  # (splits, T) int32 or None
    num_rows,
    num_columns,
    depth,  # D
    stride_wv,
    num_splits,
    cap_scale,
    score_scale,
    ROUND_TO: tl.constexpr,  # dtype of the logits, or None: fp32 accumulators as they are
    DESCRIPTORS: tl.constexpr,
    EVEN_D: tl.constexpr,  # D is a multiple of BLOCK_D
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SUBTILES: tl.constexpr,  # 1 or 2 per tile, folded one after the other
    TILES: tl.constexpr,  # per split
    GROUP: tl.constexpr,  # row blocks that run side by side, so that x stays in the cache
    REPAIR: tl.constexpr = False,
):
    EXTRAS: tl.constexpr = best_ptr is not None
    SUBTILE_V: tl.constexpr = BLOCK_V // SUBTILES
    first_row, split = block_and_split(num_rows, num_splits, BLOCK_T, GROUP)
    rows = first_row + tl.arange(0, BLOCK_T)
    mask_t = rows < num_rows
    if REPAIR:  # only the sums of :func:`anchored_kernel` that overflowed
        mask_t &= overflowed(
            sums_ptr=sums_ptr,
            split=split,
            rows=rows,
            mask=mask_t,
            num_rows=num_rows,
            num_splits=num_splits,
        )
        if tl.max(mask_t.to(tl.int32), axis=0) == 0:
            return
    target = tl.load(target_ptr + rows, mask=mask_t, other=-1).to(tl.int32)
    inside = tl.minimum(rows, num_rows - 1)
    f2 = common.row_factor(score_scale, temperature_ptr, inside) * LOG2_E
    f2 += tl.zeros((BLOCK_T,), tl.float32)
    zero = tl.zeros((BLOCK_T,), tl.float32)
    infinite = tl.full((BLOCK_T,), float("inf"), tl.float32)
    sums = -infinite, zero, zero, zero, infinite, tl.full((BLOCK_T,), _NO_COLUMN, tl.int32)
    first_column = split * (TILES * BLOCK_V)
    for tile in range(tl.minimum(tl.cdiv(num_columns - first_column, BLOCK_V), TILES)):
        tile_column = first_column + tile * BLOCK_V
        acc = logits_tile(
            x_ptr=x_ptr,
            weight_ptr=weight_ptr,
            first_row=first_row,
            first_column=tile_column,
            num_rows=num_rows,
            num_columns=num_columns,
            depth=depth,
            stride_wv=stride_wv,
            DESCRIPTORS=DESCRIPTORS,
            EVEN_D=EVEN_D,
            UPCAST=UPCAST,
            BLOCK_T=BLOCK_T,
            BLOCK_V=BLOCK_V,
            BLOCK_D=BLOCK_D,
        )
        subtiles = (acc,)
        if SUBTILES == 2:
            subtiles = tl.split(tl.permute(tl.reshape(acc, (BLOCK_T, 2, SUBTILE_V)), (0, 2, 1)))
        for subtile in tl.static_range(SUBTILES):
            subtile_column = tile_column + subtile * SUBTILE_V
            offs_v = subtile_column + tl.arange(0, SUBTILE_V)
            mask_v = offs_v < num_columns
            logits = subtiles[subtile]
            if ROUND_TO is not None:
                logits = rounded(logits, ROUND_TO, UPCAST).to(tl.float32)
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)
                logits += bias[None, :]
                if ROUND_TO is not None:
                    logits = rounded(logits, ROUND_TO, UPCAST).to(tl.float32)
            y = common.bounded(logits, cap_scale)
            here = (target >= subtile_column) & (target < subtile_column + SUBTILE_V)
            if tl.max(here.to(tl.int32), axis=0) > 0:
                y_target = tl.sum(tl.where(offs_v[None, :] == target[:, None], y, 0.0), axis=1)
                tl.store(y_target_ptr + rows, y_target, mask=mask_t & here)
            # masked after the transform: a softcap would turn -inf into a finite value
            y = tl.where(mask_v[None, :], y, float("-inf"))
            sums = _fold(y=y, columns=offs_v, mask_v=mask_v, f2=f2, sums=sums, EXTRAS=EXTRAS)
    at = split.to(tl.int64) * num_rows + rows
    if EXTRAS:
        tl.store(best_ptr + at, sums[5], mask=mask_t)
    for index in tl.static_range(5 if EXTRAS else 3):
        tl.store(sums_ptr + at, sums[index], mask=mask_t)
        at += tl.cast(num_splits, tl.int64) * num_rows


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_PER_SPLIT)
def _merge_splits_kernel(
    target_ptr,  # (T,) int64
    temperature_ptr,  # (T,) or None
    y_target_ptr,  # (T,) fp32
    sums_ptr,  # (3 or, with ``best_ptr``, 5, splits, T) fp32
    best_ptr,  # (splits, T) int32 or None
    logprobs_ptr,  # (T,) fp32, as the other results
    entropy_ptr,
    lse_ptr,  # fp64
    is_top1_ptr,  # bool
    sum_sq_probs_ptr,
    max_logit_ptr,
    min_logit_ptr,
    exp_ptr,  # (T, V) bf16, of :func:`anchored_kernel`, or None
    unit_ptr,  # (T,) fp32, with ``exp_ptr`` like the next two
    anchor_ptr,  # (T,) fp32
    moved_ptr,  # (T,) bool, rows that change their anchor to the logsumexp of their logits
    stride_exp,
    num_rows,
    num_columns,
    num_splits,
    score_scale,
    UPCAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    EXTRAS: tl.constexpr = best_ptr is not None
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    factor = common.row_factor(score_scale, temperature_ptr, tl.minimum(rows, num_rows - 1))
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float64)
    moment = tl.zeros((BLOCK,), tl.float64)
    squares = tl.zeros((BLOCK,), tl.float32)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    best = tl.zeros((BLOCK,), tl.int32)
    at = rows
    size = tl.cast(num_splits, tl.int64) * num_rows
    for _ in range(0, num_splits):
        its_peak = tl.load(sums_ptr + at, mask=mask, other=0.0)
        its_total = tl.load(sums_ptr + size + at, mask=mask, other=1.0)
        its_moment = tl.load(sums_ptr + 2 * size + at, mask=mask, other=0.0)
        its_squares = its_total
        if EXTRAS:
            its_squares = tl.load(sums_ptr + 3 * size + at, mask=mask, other=0.0)
        f2 = factor * LOG2_E
        new_peak, base, total, moment, squares = common.raised(
            peak=peak, total=total, moment=moment, squares=squares, other_peak=its_peak, f2=f2
        )
        more = common.rebased(
            peak=its_peak, total=its_total, moment=its_moment, squares=its_squares, base=base, f2=f2
        )
        total = total + more[0]
        moment = moment + more[1]
        squares = squares + more[2]
        if EXTRAS:
            its_least = tl.load(sums_ptr + 4 * size + at, mask=mask, other=0.0)
            least = tl.minimum(least, its_least)
            best = tl.where(its_peak > peak, tl.load(best_ptr + at, mask=mask, other=0), best)
        peak = new_peak
        at += num_rows

    y_target = tl.load(y_target_ptr + rows, mask=mask, other=0.0)
    moment = moment.to(tl.float32)
    results = (
        logprobs_ptr,
        entropy_ptr,
        lse_ptr,
        is_top1_ptr,
        sum_sq_probs_ptr,
        max_logit_ptr,
        min_logit_ptr,
    )
    extras = None
    if EXTRAS:
        is_top1 = tl.load(target_ptr + rows, mask=mask, other=0).to(tl.int32) == best
        extras = squares, is_top1, least
    logp = common.store_stats(
        results=results,
        at=rows,
        mask=mask,
        y_target=y_target,
        peak=peak,
        total=total,
        moment=moment,
        factor=factor,
        extras=extras,
    )
    if exp_ptr is not None:
        anchor = tl.load(anchor_ptr + rows, mask=mask, other=0.0)
        log_total = tl.log(total.to(tl.float32))
        log_sum = (peak - anchor) * factor + log_total
        moved = (log_sum > _REACH) | (log_sum != log_sum)
        anchor = tl.where(moved, peak + log_total / factor, anchor)
        at_target, unit, finite = common.at_the_target(
            logp=logp, anchor=anchor, peak=peak, total=total, factor=factor
        )
        tl.store(anchor_ptr + rows, anchor, mask=mask)
        tl.store(moved_ptr + rows, moved, mask=mask)
        tl.store(unit_ptr + rows, unit, mask=mask)
        target = tl.load(target_ptr + rows, mask=mask, other=0)
        at_target = rounded(tl.where(finite, at_target, 0.0), tl.bfloat16, UPCAST)
        inside = mask & (target < num_columns)
        tl.store(exp_ptr + rows * stride_exp + target, at_target, mask=inside)


def linear_stats(
    hidden: Tensor,  # (T, D) bf16 or fp16
    head: Head,  # multiplied in the dtype of ``hidden``
    target: Tensor,  # (T,) int64 in [0, V)
    precision: str,
    extras: bool,
    config: LinearConfig | None = None,  # the table's
) -> RowStats:
    """Return the statistics of every row of a 16-bit head; see :class:`RowStats`."""
    config = config or linear_config(hidden.dtype, head)
    hidden, head, target = operands(hidden, head, target)
    tile = config.of_one_subtile() if extras else config
    rows = len(hidden)
    splits = triton.cdiv(len(head.weight), tile.split_columns)
    stats = empty_stats(rows, hidden.device, extras)
    size = max(1, _PARTIAL_BYTES // (4 * 3 * splits) // _CHUNK_ROWS) * _CHUNK_ROWS
    with common.launching(config, hidden):
        for start in range(0, rows, size):
            chunk = slice(start, min(start + size, rows))
            launch = LinearLaunch.of(
                hidden=hidden[chunk],
                head=head.rows(chunk),
                target=target[chunk],
                config=tile,
                extras=extras,
            )
            launch.add_up(logits_dtype(hidden.dtype, precision))
            launch.merge(stats.rows(chunk))
    return stats


@dataclass(frozen=True, kw_only=True)
class LinearLaunch:
    """The arguments of kernels that sum a block of rows over splits of the vocabulary."""

    hidden: Tensor
    head: Head
    target: Tensor
    config: LinearConfig
    transform: dict[str, object]
    y_target: Tensor  # (T,) fp32
    sums: Tensor  # (3 or, with extras, 5, splits, T) fp32
    best: Tensor | None  # (splits, T) int32, with extras

    @staticmethod
    def of(
        hidden: Tensor,
        head: Head,
        target: Tensor,
        config: LinearConfig,
        extras: bool,
    ) -> LinearLaunch:
        """Allocate for these :func:`operands`."""
        rows = len(hidden)
        splits = triton.cdiv(len(head.weight), config.split_columns)
        sums = hidden.new_empty((5 if extras else 3, splits, rows), dtype=torch.float32)
        return LinearLaunch(
            hidden=hidden,
            head=head,
            target=target,
            config=config,
            transform=common.transform_arguments(head.transform, hidden),
            y_target=sums.new_empty(rows),
            sums=sums,
            best=sums.new_empty((splits, rows), dtype=torch.int32) if extras else None,
        )

    @property
    def products(self) -> dict[str, object]:
        """The operands of the product, and their sizes."""
        weight = self.head.weight
        config = self.config
        return {
            "x_ptr": described(self.hidden, config.block_t, config),
            "weight_ptr": described(weight, config.block_v, config),
            "temperature_ptr": self.transform["temperature_ptr"],
            "score_scale": self.transform["score_scale"],
            "num_rows": len(self.hidden),
            "num_columns": len(weight),
            "depth": weight.shape[1],
            "stride_wv": row_stride(weight),
            "num_splits": self.sums.shape[1],
        }

    @property
    def results(self) -> dict[str, Tensor | None]:
        """The outputs of the product's epilogue, and the targets."""
        return {
            "target_ptr": self.target,
            "y_target_ptr": self.y_target,
            "sums_ptr": self.sums,
            "best_ptr": self.best,
        }

    @property
    def grid(self) -> tuple[int]:
        """Programs: one for each block of rows and split."""
        return (triton.cdiv(len(self.hidden), self.config.block_t) * self.sums.shape[1],)

    def add_up(self, logits: torch.dtype, repair: bool = False) -> None:
        """Fill the sums, from logits in a dtype; ``repair``: only sums that overflowed."""
        linear_stats_kernel[self.grid](
            **self.products,
            **self.results,
            bias_ptr=self.head.bias,
            cap_scale=self.transform["cap_scale"],
            ROUND_TO=_ROUNDED.get(logits),
            SUBTILES=self.config.subtiles,
            REPAIR=repair,
            **constants(self.config, self.hidden.shape[1]),
        )

    def merge(self, stats: RowStats, **exponentials: Any) -> None:
        """Fill the statistics; also finish the ``exponentials`` of :func:`anchored_kernel`."""
        absent = dict.fromkeys(("exp_ptr", "unit_ptr", "anchor_ptr", "moved_ptr"))
        _merge_splits_kernel[(triton.cdiv(len(self.hidden), _MERGED_ROWS),)](
            **self.results,
            temperature_ptr=self.transform["temperature_ptr"],
            score_scale=self.transform["score_scale"],
            num_rows=len(self.hidden),
            num_columns=len(self.head.weight),
            num_splits=self.sums.shape[1],
            UPCAST=knobs.runtime.interpret,
            BLOCK=_MERGED_ROWS,
            **{**absent, "stride_exp": 0, **exponentials},
            **common.pointers(stats),
            **common.OPTIONS,
        )
