"""Log-probabilities without a gradient: softmax statistics in the epilogue of the logits GEMM.

A program owns a block of rows and a split of the vocabulary. It forms one tile of fp32 logits
after the other and folds each into the sums of its rows, so that no logit leaves the chip. A second
kernel merges the splits in their order. What a split is depends on the head alone: a row's bits are
the same in every batch.

A tile is folded in two subtiles where one would not fit into the registers beside its temporaries.
With extras a tile is a single subtile, and folding keeps its order. Where threads hold both alike
(Hopper and Blackwell: `tests/gpu/test_bits.py`), the other statistics keep their bits.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from grpo_kernels.backends.base import RowStats, empty_stats
from grpo_kernels.backends.gpu_tiles import LinearConfig, linear_config, row_stride
from grpo_kernels.backends.triton import common
from grpo_kernels.backends.triton.math import LOG2_E
from grpo_kernels.head import Head, logits_dtype

_NO_COLUMN = tl.constexpr(2**31 - 1)
_MERGED_ROWS = 128  # by one program
_ROUNDED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# bound on the sums of the splits; longer batches are launched in chunks
_PARTIAL_BYTES = 32 << 20
_CHUNK_ROWS = 2048  # or a multiple
_COUNTS = ["num_rows", "num_splits"]  # a new value of these brings no compilation
_PER_SPLIT = [*common.PER_ROW, "sums_ptr", "best_ptr"]


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Round fp32 ``x`` to the digits of ``DTYPE``."""
    if UPCAST and DTYPE.is_bf16():  # Triton's interpreter truncates
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & -0x10000).to(tl.float32, bitcast=True)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _fold(y, columns, mask_v, f2, sums, EXTRAS: tl.constexpr):
    """Add bounded logits (rows, columns) to sums of rows; ``best``: the peak's first column."""
    peak, total, moment, squares, least, best = sums
    its_peak = tl.max(y, axis=1)
    new_peak, base, total, moment, squares = common.raised(
        peak, total, moment, squares, its_peak, f2
    )
    if EXTRAS:
        least = tl.minimum(least, tl.min(tl.where(mask_v[None, :], y, float("inf")), axis=1))
        at_peak = tl.where(y == its_peak[:, None], columns[None, :], _NO_COLUMN)
        best = tl.where(its_peak > peak, tl.min(at_peak, axis=1), best)
    total, moment, squares, _ = common.folded(y, base, total, moment, squares, f2, EXTRAS)
    return new_peak, total, moment, squares, least, best


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
    inner,
    outer,
    ROUND_TO: tl.constexpr,  # dtype of the logits, or None: fp32 accumulators as they are
    DESCRIPTORS: tl.constexpr,
    EVEN_D: tl.constexpr,  # D is a multiple of BLOCK_D
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SUBTILES: tl.constexpr,  # 1 or 2, of a tile, folded one after the other
    TILES: tl.constexpr,  # of a split
    GROUP: tl.constexpr,  # row blocks that run side by side, so that x stays in the cache
):
    EXTRAS: tl.constexpr = best_ptr is not None
    SUBTILE_V: tl.constexpr = BLOCK_V // SUBTILES
    # which rows and split are this program's
    program, num_blocks = tl.program_id(0), tl.cdiv(num_rows, BLOCK_T)
    first_block = program // (GROUP * num_splits) * GROUP
    group = tl.minimum(num_blocks - first_block, GROUP)
    within = program % (GROUP * num_splits)
    first_row, split = (first_block + within % group) * BLOCK_T, within // group
    rows = first_row + tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    mask_t = rows < num_rows
    target = tl.load(target_ptr + rows, mask=mask_t, other=-1).to(tl.int32)
    inside = tl.minimum(rows, num_rows - 1)
    f2 = common.row_factor(outer, temperature_ptr, inside) * LOG2_E
    f2 += tl.zeros((BLOCK_T,), tl.float32)
    zero = tl.zeros((BLOCK_T,), tl.float32)
    infinite = tl.full((BLOCK_T,), float("inf"), tl.float32)
    sums = -infinite, zero, zero, zero, infinite, tl.full((BLOCK_T,), _NO_COLUMN, tl.int32)
    first_column = split * (TILES * BLOCK_V)
    for tile in range(tl.minimum(tl.cdiv(num_columns - first_column, BLOCK_V), TILES)):
        tile_column = first_column + tile * BLOCK_V
        columns = tile_column + tl.arange(0, BLOCK_V)
        acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for start in tl.range(0, depth, BLOCK_D):
            if DESCRIPTORS:  # zeros beyond the ends
                x = x_ptr.load([first_row, start])
                w = weight_ptr.load([tile_column, start])
            else:
                x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * depth + (start + offs_d)[None, :]
                w_ptrs = weight_ptr + columns.to(tl.int64)[:, None] * stride_wv
                w_ptrs += (start + offs_d)[None, :]
                mask_x, mask_w = (rows < num_rows)[:, None], (columns < num_columns)[:, None]
                if not EVEN_D:
                    mask_d = (start + offs_d < depth)[None, :]
                    mask_x, mask_w = mask_x & mask_d, mask_w & mask_d
                x = tl.load(x_ptrs, mask=mask_x, other=0.0)
                w = tl.load(w_ptrs, mask=mask_w, other=0.0)
            if UPCAST:  # Triton's interpreter multiplies bf16 wrongly
                x, w = x.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        subtiles = (acc,)
        if SUBTILES == 2:
            subtiles = tl.split(tl.permute(tl.reshape(acc, (BLOCK_T, 2, SUBTILE_V)), (0, 2, 1)))
        for subtile in tl.static_range(SUBTILES):
            subtile_column = tile_column + subtile * SUBTILE_V
            offs_v = subtile_column + tl.arange(0, SUBTILE_V)
            mask_v = offs_v < num_columns
            logits = subtiles[subtile]
            if ROUND_TO is not None:
                logits = _rounded(logits, ROUND_TO, UPCAST)
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)
                logits += bias[None, :]
                if ROUND_TO is not None:
                    logits = _rounded(logits, ROUND_TO, UPCAST)
            y = common.bounded(logits, inner)
            here = (target >= subtile_column) & (target < subtile_column + SUBTILE_V)
            if tl.max(here.to(tl.int32), axis=0) > 0:
                y_target = tl.sum(tl.where(offs_v[None, :] == target[:, None], y, 0.0), axis=1)
                tl.store(y_target_ptr + rows, y_target, mask=mask_t & here)
            # masked after the transform: a softcap would turn -inf into a finite value
            y = tl.where(mask_v[None, :], y, float("-inf"))
            sums = _fold(y, offs_v, mask_v, f2, sums, EXTRAS)
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
    BLOCK: tl.constexpr,
):
    EXTRAS: tl.constexpr = best_ptr is not None
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    factor = common.row_factor(outer, temperature_ptr, tl.minimum(rows, num_rows - 1))
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float64)
    moment = tl.zeros((BLOCK,), tl.float64)
    squares = tl.zeros((BLOCK,), tl.float32)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    best = tl.zeros((BLOCK,), tl.int32)
    at, size = rows, tl.cast(num_splits, tl.int64) * num_rows
    for _ in range(0, num_splits):
        its_peak = tl.load(sums_ptr + at, mask=mask, other=0.0)
        its_total = tl.load(sums_ptr + size + at, mask=mask, other=1.0)
        its_moment = tl.load(sums_ptr + 2 * size + at, mask=mask, other=0.0)
        its_squares = its_total
        if EXTRAS:
            its_squares = tl.load(sums_ptr + 3 * size + at, mask=mask, other=0.0)
        f2 = factor * LOG2_E
        new_peak, base, total, moment, squares = common.raised(
            peak, total, moment, squares, its_peak, f2
        )
        more = common.rebased(its_peak, its_total, its_moment, its_squares, base, f2)
        total, moment, squares = total + more[0], moment + more[1], squares + more[2]
        if EXTRAS:
            its_least = tl.load(sums_ptr + 4 * size + at, mask=mask, other=0.0)
            least = tl.minimum(least, its_least)
            best = tl.where(its_peak > peak, tl.load(best_ptr + at, mask=mask, other=0), best)
        peak = new_peak
        at += num_rows

    y_target = tl.load(y_target_ptr + rows, mask=mask, other=0.0)
    moment = moment.to(tl.float32)
    results = (
        logp_ptr, entropy_ptr, lse_ptr, is_top1_ptr, sum_sq_probs_ptr, max_logit_ptr, min_logit_ptr
    )  # fmt: skip
    extras = None
    if EXTRAS:
        is_top1 = tl.load(target_ptr + rows, mask=mask, other=0).to(tl.int32) == best
        extras = squares, is_top1, least
    common.store_stats(results, rows, mask, y_target, peak, total, moment, factor, extras)


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
    weight = head.weight.to(hidden.dtype)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    bias = head.bias.contiguous() if head.bias is not None else None
    if not hidden.is_contiguous() or hidden.data_ptr() % 16:
        # which kernel runs on a row must not depend on where in memory its batch lies
        hidden = hidden.clone(memory_format=torch.contiguous_format)
    tile = config.of_one_subtile() if extras else config
    (rows, depth), splits = hidden.shape, triton.cdiv(len(weight), tile.split_columns)
    stats, target = empty_stats(rows, hidden.device, extras), target.contiguous()
    described = _described(weight, tile.block_v, tile)
    logits = logits_dtype(hidden.dtype, precision)
    size = max(1, _PARTIAL_BYTES // (4 * 3 * splits) // _CHUNK_ROWS) * _CHUNK_ROWS
    with common.launching(config, hidden):
        for start in range(0, rows, size):
            chunk = slice(start, min(start + size, rows))
            x, count = hidden[chunk], chunk.stop - start
            transform = common.transform_arguments(head.transform.rows(chunk), x)
            sums = x.new_empty((5 if extras else 3, splits, count), dtype=torch.float32)
            best = sums.new_empty((splits, count), dtype=torch.int32) if extras else None
            both = {
                "target_ptr": target[chunk],
                "y_target_ptr": sums.new_empty(count),
                "sums_ptr": sums,
                "best_ptr": best,
                "num_rows": count,
                "num_splits": splits,
            }
            linear_stats_kernel[(triton.cdiv(count, tile.block_t) * splits,)](
                x_ptr=_described(x, tile.block_t, tile),
                weight_ptr=described,
                bias_ptr=bias,
                num_columns=len(weight),
                depth=depth,
                stride_wv=row_stride(weight),
                **both,
                **transform,
                **constants(tile, depth, logits),
            )
            _merge_splits_kernel[(triton.cdiv(count, _MERGED_ROWS),)](
                BLOCK=_MERGED_ROWS,
                temperature_ptr=transform["temperature_ptr"],
                outer=transform["outer"],
                **both,
                **common.pointers(stats.rows(chunk)),
                **common.OPTIONS,
            )
    return stats


def _described(x: Tensor, rows: int, config: LinearConfig) -> Tensor | TensorDescriptor:
    """Return a matrix as kernels take it, that many rows at once."""
    if not config.descriptors:
        return x
    return TensorDescriptor(x, list(x.shape), [row_stride(x), 1], [rows, config.block_d])


def constants(config: LinearConfig, depth: int, logits: torch.dtype) -> dict[str, object]:
    """Return the constants that the kernel is specialised on, besides its flags."""
    return {
        "ROUND_TO": _ROUNDED.get(logits),
        "EVEN_D": depth % config.block_d == 0,
        "UPCAST": knobs.runtime.interpret,
        **{name.upper(): x for name, x in asdict(config).items() if name not in config.options},
        **config.options,
    }
