"""Entries of a row's gradient that matter: one read of the row marks them, a second kernel lists
what is marked.

The row holds its logits, or ``E``: the gradient of its log-probability, up to a factor.
Marks are bits, of 32 blocks in a word of each strand: a sixteenth of the bytes of ``E``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import (
    ANY_ERROR,
    WHOLE,
    Entries,
    RowStats,
    StatsGrad,
    Tile,
    TileGradient,
)
from grpo_kernels.backends.entries import GOLDEN, NUM_CUTS, STRANDS, TINY, sampled_blocks
from grpo_kernels.backends.gpu_tiles import RowConfig
from grpo_kernels.backends.triton import common
from grpo_kernels.backends.triton.math import LN2, expm1

_GOLDEN, _WHOLE, _STRANDS = map(tl.constexpr, (GOLDEN, WHOLE, STRANDS))
_ANY, _TINY, _LEAST_SQUARE = map(tl.constexpr, (ANY_ERROR, TINY, TINY**2))
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0
_GROUP = tl.constexpr(32)  # blocks, one for each bit of a word
_READING_WARPS, _LISTING_WARPS, _LISTED_ENTRIES = 8, 4, 512
_WEIGHED_ROWS = 1024  # at a time
_MARKED_ROWS = 512  # at a time: the words of more are memory and no gain
_POINTERS = [
    *common.PER_ROW,
    "unit_ptr",
    "weight_ptr",
    "cuts_ptr",
    "sums_ptr",
    "tail_ptr",
    "squares_ptr",
]
_POINTERS += [f"{name}_ptr" for name in Entries._fields]


@triton.jit
def _row(
    logits_ptr, unit_ptr, target_ptr, temperature_ptr, entropy_ptr, lse_ptr, dlogp_ptr,
    dentropy_ptr, stride_row, num_columns, cap_scale, score_scale,
):  # fmt: skip
    """Return values of this program's row for :func:`_sizes`, and whether its softmax is finite.

    What is not needed is 0: Triton 3.6 cannot return None.
    """
    row = tl.program_id(0).to(tl.int64)
    factor = common.row_factor(score_scale, temperature_ptr, row)
    slope = factor if cap_scale is None else factor * cap_scale
    lse = tl.load(lse_ptr + row)
    finite = lse - lse == 0.0
    constant, by_log = 0.0, 0.0  # the gradient is p times a constant plus a share of log2 p
    if unit_ptr is None:
        anchor, f2, rest = common.unit_of(lse, factor)
        if dentropy_ptr is not None:
            dentropy = tl.load(dentropy_ptr + row).to(tl.float32)
            constant = tl.load(dlogp_ptr + row).to(tl.float32)
            constant += dentropy * tl.load(entropy_ptr + row)
            by_log = dentropy * LN2
    else:
        slope = tl.abs(tl.load(unit_ptr + row))
        finite = finite & (slope == slope)
        anchor, f2, rest = 0.0, 0.0, 0.0
    target = tl.load(target_ptr + row).to(tl.int32)
    target = tl.where(target < num_columns, target, -1)  # in another rank's columns
    values = logits_ptr + row * stride_row, target, slope, anchor, f2, rest, constant, by_log
    return values, finite


@triton.jit
def _sizes(
    this,
    scale,
    columns,
    mask,
    SIGNED: tl.constexpr = False,
):
    """Return sizes times ``scale``, below 0 at the target; 0 where the mask is not set.

    ``SIGNED``: the entries themselves, negated, and the target's as those of the others.
    """
    values, unit_ptr, dentropy_ptr, cap_scale = this
    logits_ptr, target, slope, anchor, f2, rest, constant, by_log = values
    if unit_ptr is not None:  # the logits are E
        e = tl.load(logits_ptr + columns, mask, None if mask is None else 0.0)
        size = e.to(tl.float32) * (slope * scale)
    else:
        x = tl.load(logits_ptr + columns, mask, None if mask is None else float("-inf"))
        log2_p = tl.fma(common.bounded(x, cap_scale) - anchor, f2, -rest)
        size = tl.exp2(log2_p) * (slope * scale)
        if dentropy_ptr is not None:
            of_logs = tl.fma(tl.maximum(log2_p, common.LOG2_UNDERFLOW), by_log, constant)
            size = size * (of_logs if SIGNED else tl.abs(of_logs))
        if cap_scale is not None:  # which turns -inf into a finite value
            size = size * common.softcap_slope(x, cap_scale)
            if mask is not None:
                size = tl.where(mask, size, 0.0)
        if not SIGNED:
            size = tl.where(columns == target, -1.0, size)
    return size


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_POINTERS)
def _weigh_kernel(
    temperature_ptr,  # (C,) or None
    logprobs_ptr,  # (C,) fp32
    lse_ptr,  # (C,) fp64
    dlogp_ptr,  # (C,), or None: 1
    weight_ptr,  # (C,) fp32
    cuts_ptr,  # (K,) fp32
    num_rows,
    allowed,  # squared error of a row
    score_scale,
    NUM_CUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weigh rows, and choose the cuts to try, as ``Backend.chosen_cuts`` does; one program."""
    squares = tl.zeros((BLOCK,), tl.float64)
    mass = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, num_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        mask = rows < num_rows
        lse = tl.load(lse_ptr + rows, mask=mask, other=float("inf"))
        factor = common.row_factor(score_scale, temperature_ptr, tl.minimum(rows, num_rows - 1))
        logp = tl.minimum(tl.load(logprobs_ptr + rows, mask=mask, other=0.0), 0.0)
        weight = tl.zeros((BLOCK,), tl.float32) + 1.0
        if dlogp_ptr is not None:
            weight = tl.abs(tl.load(dlogp_ptr + rows, mask=mask, other=0.0).to(tl.float32))
        tl.store(weight_ptr + rows, weight, mask=mask)
        size = tl.where(lse - lse == 0.0, -expm1(logp) * factor * weight, 0.0).to(tl.float64)
        squares += size * size
        mass += size
    unit = tl.sqrt(tl.maximum(tl.sum(squares, axis=0) / num_rows, _LEAST_SQUARE))
    least = tl.cast(allowed, tl.float64) * num_rows * unit / tl.maximum(tl.sum(mass, axis=0), _TINY)
    log_least = tl.log2(tl.minimum(tl.maximum(least, _TINY), 1.0).to(tl.float32))
    offs_k = tl.arange(0, BLOCK_K)
    cuts = tl.exp2(log_least * (1.0 - offs_k.to(tl.float32) / (NUM_CUTS - 1)))
    tl.store(cuts_ptr + offs_k, cuts, mask=offs_k < NUM_CUTS)
    tl.debug_barrier()  # others stored the weights that are read
    for start in range(0, num_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        mask = rows < num_rows
        weight = tl.load(weight_ptr + rows, mask=mask, other=0.0)
        tl.store(weight_ptr + rows, weight / unit.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_POINTERS)
def _pick_kernel(
    weight_ptr,  # (C,) fp32
    tried_ptr,  # (K,) fp32
    sums_ptr,  # (C, 2, K) fp32
    cuts_ptr,  # (C,) fp32
    num_rows,
    allowed,  # squared error of a row
    part,  # of all blocks that were sampled
    NUM_CUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose the cut that has the allowed error, as ``best_cut`` does; one program."""
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < NUM_CUTS
    sizes = tl.zeros((BLOCK_K,), tl.float64)
    squares = tl.zeros((BLOCK_K,), tl.float64)
    for start in range(0, num_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        mask = (rows < num_rows)[:, None] & mask_k[None, :]
        at = sums_ptr + rows[:, None] * (2 * NUM_CUTS) + offs_k[None, :]
        sizes += tl.sum(tl.load(at, mask=mask, other=0.0).to(tl.float64), axis=0)
        squares += tl.sum(tl.load(at + NUM_CUTS, mask=mask, other=0.0).to(tl.float64), axis=0)
    tried = tl.load(tried_ptr + offs_k, mask=mask_k, other=1.0).to(tl.float64)
    most = tl.cast(allowed, tl.float64) * num_rows * part
    errors = tried * sizes - squares
    fits = (errors <= most) & mask_k
    low = tl.max(tl.where(fits, tried, 0.0), axis=0)
    low_error = tl.max(tl.where(fits, errors, 0.0), axis=0)
    beyond = mask_k & (errors > most)
    high = tl.min(tl.where(beyond, tried, float("inf")), axis=0)
    high_error = tl.min(tl.where(beyond, errors, float("inf")), axis=0)
    cut = low + (most - low_error) * (high - low) / (high_error - low_error)
    cut = tl.where(high == float("inf"), low, cut).to(tl.float32)
    rows_at_a_time: tl.constexpr = BLOCK * BLOCK_K
    for start in range(0, num_rows, rows_at_a_time):
        rows = start + tl.arange(0, rows_at_a_time)
        weight = tl.load(weight_ptr + rows, mask=rows < num_rows, other=0.0)
        cuts = tl.where(weight > 0.0, cut / tl.maximum(weight, _TINY), _ANY)
        tl.store(cuts_ptr + rows, cuts, mask=rows < num_rows)


@triton.jit(do_not_specialize_on_alignment=_POINTERS)
def _tail_sums_kernel(
    logits_ptr,  # (C, V), or E
    unit_ptr,  # (C,) fp32, of E; else None
    target_ptr,  # (C,) int64
    temperature_ptr,  # (C,) or None
    entropy_ptr,  # (C,) fp32, or None as dlogp_ptr and dentropy_ptr
    lse_ptr,  # (C,) fp64
    dlogp_ptr,  # (C,)
    dentropy_ptr,  # (C,)
    weight_ptr,  # (C,) fp32
    cuts_ptr,  # (K,) fp32
    sums_ptr,  # (C, 2, K) fp32
    stride_row,
    num_columns,
    blocks,
    sampled,
    cap_scale,
    score_scale,
    NUM_CUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values, finite = _row(
        logits_ptr=logits_ptr,
        unit_ptr=unit_ptr,
        target_ptr=target_ptr,
        temperature_ptr=temperature_ptr,
        entropy_ptr=entropy_ptr,
        lse_ptr=lse_ptr,
        dlogp_ptr=dlogp_ptr,
        dentropy_ptr=dentropy_ptr,
        stride_row=stride_row,
        num_columns=num_columns,
        cap_scale=cap_scale,
        score_scale=score_scale,
    )
    this = values, unit_ptr, dentropy_ptr, cap_scale
    num_active = tl.where(finite, num_columns, 0)
    weight = tl.load(weight_ptr + row)
    offs_k = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_K,), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for i in range(sampled):
        block = ((row + i * blocks // sampled) % blocks).to(tl.int32)
        columns = block * _STRANDS + tl.arange(0, _STRANDS)
        sizes = tl.maximum(_sizes(this, weight, columns, columns < num_active), 0.0)
        for k in tl.static_range(NUM_CUTS):
            tail = tl.where(sizes <= tl.load(cuts_ptr + k), sizes, 0.0)
            sums += tl.where(offs_k == k, tl.sum(tail, axis=0), 0.0)
            squares += tl.where(offs_k == k, tl.sum(tail * tail, axis=0), 0.0)
    sums_ptr += row * (2 * NUM_CUTS) + offs_k
    tl.store(sums_ptr, sums, mask=offs_k < NUM_CUTS)
    tl.store(sums_ptr + NUM_CUTS, squares, mask=offs_k < NUM_CUTS)


@triton.jit
def _mixed(x):
    """Return a hash of 32 bits, the end of MurmurHash3."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _with_block(
    state,
    this,
    scale,
    block,
    end,
    bit,
):
    """Set a bit of each strand whose column in a block is an entry."""
    words, left, squares = state
    columns = block * _STRANDS + tl.arange(0, _STRANDS)
    size = _sizes(this, scale, columns, None if end is None else columns < end)
    # as integers negative numbers are large, too: the target is an entry
    in_tail = size.to(tl.uint32, bitcast=True) <= _ONE
    share = tl.where(in_tail, size, 0.0)
    squares = tl.fma(share, share, squares)
    left -= share
    drawn = left <= 0.0
    left = tl.where(drawn, left + 1.0, left)
    words = tl.where(in_tail & (drawn == 0), words, words | bit)
    return words, left, squares


@triton.jit(do_not_specialize=["seed", "first_row"], do_not_specialize_on_alignment=_POINTERS)
def _mark_kernel(
    logits_ptr,  # (C, V), or E
    unit_ptr,  # (C,) fp32, of E; else None
    target_ptr,  # (C,) int64
    temperature_ptr,  # (C,) or None
    entropy_ptr,  # (C,) fp32, or None as dlogp_ptr and dentropy_ptr
    lse_ptr,  # (C,) fp64
    dlogp_ptr,  # (C,)
    dentropy_ptr,  # (C,)
    cuts_ptr,  # (C,) fp32
    words_ptr,  # (C, groups, STRANDS) int32
    tail_ptr,  # (C,) fp32, the sum of sizes up to the cut minus the number drawn, in cuts
    squares_ptr,  # (C,) fp32, of their squares
    stride_row,
    num_columns,
    groups,
    seed,
    first_row,
    cap_scale,
    score_scale,
):
    row = tl.program_id(0).to(tl.int64)
    values, finite = _row(
        logits_ptr=logits_ptr,
        unit_ptr=unit_ptr,
        target_ptr=target_ptr,
        temperature_ptr=temperature_ptr,
        entropy_ptr=entropy_ptr,
        lse_ptr=lse_ptr,
        dlogp_ptr=dlogp_ptr,
        dentropy_ptr=dentropy_ptr,
        stride_row=stride_row,
        num_columns=num_columns,
        cap_scale=cap_scale,
        score_scale=score_scale,
    )
    this = values, unit_ptr, dentropy_ptr, cap_scale
    cut = tl.load(cuts_ptr + row)
    if not (finite & (cut < _ANY)):
        return
    scale = 1.0 / tl.maximum(cut, _TINY)
    strands = tl.arange(0, _STRANDS)
    # where each strand draws first; as ``row_keys`` has it
    bits = tl.load(lse_ptr + row).to(tl.int64, bitcast=True)
    key = _mixed((first_row + row).to(tl.uint32) * _GOLDEN + seed.to(tl.uint32))
    key = _mixed(_mixed(key ^ bits.to(tl.uint32)) ^ (bits >> 32).to(tl.uint32))
    hashed = _mixed(strands.to(tl.uint32) * _GOLDEN + key) >> 8
    start = (hashed.to(tl.int32).to(tl.float32) + 0.5) * 2.0**-24
    left = start
    squares = tl.zeros((_STRANDS,), tl.float32)
    whole = num_columns // _STRANDS
    words_ptr += row * groups * _STRANDS + strands
    for group in range(groups):
        first = group * _GROUP
        bit = tl.full((), 1, tl.uint32)
        state = tl.zeros((_STRANDS,), tl.uint32), left, squares
        for block in range(first, tl.minimum(first + _GROUP, whole)):
            state = _with_block(state=state, this=this, scale=scale, block=block, end=None, bit=bit)
            bit = bit << 1
        if (whole < first + _GROUP) & (whole * _STRANDS < num_columns):  # the row's end is in it
            state = _with_block(
                state=state, this=this, scale=scale, block=whole, end=num_columns, bit=bit
            )
        words, left, squares = state
        tl.store(words_ptr + group * _STRANDS, words.to(tl.int32, bitcast=True))
    tl.store(tail_ptr + row, tl.sum(start - left, axis=0))
    tl.store(squares_ptr + row, tl.sum(squares, axis=0))


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=_POINTERS)
def _list_kernel(
    logits_ptr,  # (C, V), or E
    unit_ptr,  # (C,) fp32, of E; else None
    target_ptr,  # (C,) int64
    temperature_ptr,  # (C,) or None
    logprobs_ptr,  # (C,) fp32
    entropy_ptr,  # (C,) fp32, or None as dlogp_ptr and dentropy_ptr
    lse_ptr,  # (C,) fp64
    dlogp_ptr,  # (C,)
    dentropy_ptr,  # (C,)
    cuts_ptr,  # (C,) fp32
    words_ptr,  # (C, groups, STRANDS) int32
    tail_ptr,  # (C,) fp32, as the next
    squares_ptr,
    ids_ptr,  # (C, slots) int32
    values_ptr,  # (C, slots) fp32
    used_ptr,  # (C,) int32
    error_ptr,  # (C,) fp32, as the next three
    error_l1_ptr,
    expected_error_ptr,
    norm_ptr,
    stride_row,
    num_columns,
    slots,
    groups,
    cap_scale,
    score_scale,
    BLOCK: tl.constexpr,  # entries at a time
):
    row = tl.program_id(0).to(tl.int64)
    values, finite = _row(
        logits_ptr=logits_ptr,
        unit_ptr=unit_ptr,
        target_ptr=target_ptr,
        temperature_ptr=temperature_ptr,
        entropy_ptr=entropy_ptr,
        lse_ptr=lse_ptr,
        dlogp_ptr=dlogp_ptr,
        dentropy_ptr=dentropy_ptr,
        stride_row=stride_row,
        num_columns=num_columns,
        cap_scale=cap_scale,
        score_scale=score_scale,
    )
    this = values, unit_ptr, dentropy_ptr, cap_scale
    cut = tl.load(cuts_ptr + row)
    active = finite & (cut < _ANY)
    without = tl.where(cut < _ANY, _WHOLE, 0)
    cut = tl.maximum(tl.where(active, cut, 1.0), _TINY)
    scale = 1.0 / cut
    logits_ptr = values[0]
    target = values[1]
    slope = values[2]
    logp = tl.minimum(tl.load(logprobs_ptr + row), 0.0)
    marked = active & (target >= 0)
    x = tl.load(logits_ptr + target, mask=marked, other=0.0).to(tl.float32)
    if unit_ptr is None:
        at_target = -expm1(logp)
        if dentropy_ptr is not None:
            at_target = at_target * tl.load(dlogp_ptr + row).to(tl.float32)
            bounded = tl.maximum(logp, common.LOG2_UNDERFLOW) + tl.load(entropy_ptr + row)
            at_target -= tl.load(dentropy_ptr + row).to(tl.float32) * tl.exp(logp) * bounded
        at_target = at_target * slope
        if cap_scale is not None:
            at_target = at_target * common.softcap_slope(x, cap_scale)
        at_target = tl.where(marked, at_target, 0.0)
    else:
        marked = active & (x.to(tl.int32, bitcast=True) != 0)
        at_target = -expm1(logp) * common.row_factor(score_scale, temperature_ptr, row)
        if cap_scale is not None:  # its logit is gone
            at_target = -x * slope
    ids_ptr += row * slots
    strands = tl.arange(0, _STRANDS)
    words_ptr += row * groups * _STRANDS + strands
    count = tl.zeros((), tl.int32)
    for group in range(tl.where(active, groups, 0)):
        words = tl.load(words_ptr + group * _STRANDS).to(tl.uint32, bitcast=True)
        bits = words - ((words >> 1) & 0x55555555)  # counts of 2 bits, of 4, of 8, of all
        bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
        bits = (((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
        bits = bits.to(tl.int32)
        slot = count + tl.cumsum(bits, axis=0) - bits
        count += tl.sum(bits, axis=0)
        first = group * (_GROUP * _STRANDS) + strands
        for _ in range(tl.max(bits, axis=0)):
            lowest = words & (~words + 1)
            bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            tl.store(ids_ptr + slot, first + bit * _STRANDS, mask=(words != 0) & (slot < slots))
            slot += 1
            words = words & (words - 1)
    tl.debug_barrier()  # others stored the ids that are read

    values_ptr += row * slots
    offs = tl.arange(0, BLOCK)
    num_large = tl.zeros((BLOCK,), tl.int32)
    excess = tl.zeros((BLOCK,), tl.float32)
    large_squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tl.where(count <= slots, count, 0), BLOCK):
        listed = start + offs < count
        columns = tl.load(ids_ptr + start + offs, mask=listed, other=0)
        signed = _sizes(this=this, scale=scale, columns=columns, mask=listed, SIGNED=True)
        is_target = columns == target
        size = tl.abs(signed)
        value = tl.maximum(size, 1.0) * tl.where(signed > 0.0, -cut, cut)
        value = tl.where(is_target, at_target, value)
        tl.store(values_ptr + start + offs, value, mask=listed)
        others = listed & (is_target == 0)
        large = others & (size > 1.0)
        drawn = others & (size <= 1.0)
        num_large += large.to(tl.int32)
        excess += tl.where(drawn, 1.0 - 2.0 * size, 0.0)
        large_squares += tl.where(large, size * size, 0.0)

    large = tl.sum(num_large, axis=0)
    changed = tl.sum(excess, axis=0)
    drawn = count - large - marked.to(tl.int32)
    tail = tl.maximum(tl.load(tail_ptr + row, mask=active, other=0.0) + drawn, 0.0)
    squares = tl.load(squares_ptr + row, mask=active, other=0.0)
    fits = active & (1.0 + large + tail + 4.0 * tl.sqrt(tail) <= slots) & (count <= slots)
    tl.store(used_ptr + row, tl.where(fits, count, without))
    unit = tl.where(fits, cut, 0.0)
    tl.store(error_ptr + row, unit * tl.sqrt(tl.maximum(squares + changed, 0.0)))
    tl.store(error_l1_ptr + row, unit * tl.maximum(tail + changed, 0.0))
    tl.store(expected_error_ptr + row, unit * tl.sqrt(tl.maximum(tail - squares, 0.0)))
    squares += tl.where(fits, tl.sum(large_squares, axis=0), 0.0)
    norm = tl.sqrt(at_target * at_target + squares * cut * cut)
    tl.store(norm_ptr + row, tl.where(active, norm, 0.0))


def _launch(
    kernel: Any,
    tile: Tile,
    stats: RowStats,
    gradient: TileGradient | None,
    grad_stats: StatsGrad | None,
    num_warps: int,
    **arguments: object,
) -> None:
    """Launch a kernel for the rows of a tile, whose logits may be the ``gradient`` by now."""
    unit = None
    lse = stats.lse.contiguous()
    entropy = dlogp = dentropy = None
    if grad_stats is not None:
        assert gradient is None and grad_stats.dlogp is not None and grad_stats.dentropy is not None
        dlogp = grad_stats.dlogp.contiguous()
        dentropy = grad_stats.dentropy.contiguous()
        entropy = stats.entropy.contiguous()
    if gradient is not None:
        tile = tile._replace(logits=gradient.dlogits)
        unit = gradient.row_scale
    config = RowConfig(num_warps=num_warps, depth=1)
    common.launch_rows(
        kernel,
        tile,
        config,
        unit_ptr=unit,
        lse_ptr=lse,
        entropy_ptr=entropy,
        dlogp_ptr=dlogp,
        dentropy_ptr=dentropy,
        **arguments,
    )


def tail_sums(
    tile: Tile,
    stats: RowStats,
    weight: Tensor,
    cuts: Tensor,
    gradient: TileGradient | None = None,
    grad_stats: StatsGrad | None = None,
) -> Tensor:
    """Sum up sampled tails of a tile with all targets; see :class:`Backend`."""
    rows, columns = tile.logits.shape
    blocks, sampled = sampled_blocks(rows, columns)
    sums = torch.empty((rows, 2, len(cuts)), device=tile.logits.device)
    _launch(
        kernel=_tail_sums_kernel,
        tile=tile,
        stats=stats,
        gradient=gradient,
        grad_stats=grad_stats,
        num_warps=_READING_WARPS,
        weight_ptr=weight.contiguous(),
        cuts_ptr=cuts.contiguous(),
        sums_ptr=sums,
        blocks=blocks,
        sampled=sampled,
        NUM_CUTS=len(cuts),
        BLOCK_K=triton.next_power_of_2(len(cuts)),
    )
    return sums


def common_cuts(
    tile: Tile,
    stats: RowStats,
    dlogp: Tensor | None,
    share: float,
    gradient: TileGradient | None = None,
) -> Tensor:
    """Choose the cuts of rows without a softcap; see ``Backend.chosen_cuts``."""
    (rows, columns), device = tile.logits.shape, tile.logits.device
    weight = torch.empty(rows, device=device)
    tried = torch.empty(NUM_CUTS, device=device)
    cuts = torch.empty(rows, device=device)
    if not rows:
        return cuts
    block_k = triton.next_power_of_2(NUM_CUTS)
    shared = {
        "weight_ptr": weight,
        "num_rows": rows,
        "allowed": share**2,
        "NUM_CUTS": NUM_CUTS,
        "BLOCK_K": block_k,
        **common.OPTIONS,
    }
    transform = common.transform_arguments(tile.transform, tile.logits)
    with torch.cuda.device_of(weight):
        _weigh_kernel[(1,)](
            temperature_ptr=transform["temperature_ptr"],
            score_scale=transform["score_scale"],
            logprobs_ptr=stats.logprobs.contiguous(),
            lse_ptr=stats.lse.contiguous(),
            dlogp_ptr=None if dlogp is None else dlogp.contiguous(),
            cuts_ptr=tried,
            BLOCK=_WEIGHED_ROWS,
            **shared,
        )
    sums = tail_sums(tile=tile, stats=stats, weight=weight, cuts=tried, gradient=gradient)
    blocks, sampled = sampled_blocks(rows, columns)
    with torch.cuda.device_of(weight):
        _pick_kernel[(1,)](
            tried_ptr=tried,
            sums_ptr=sums,
            cuts_ptr=cuts,
            part=sampled / blocks,
            BLOCK=_WEIGHED_ROWS // block_k,
            **shared,
        )
    return cuts


def extract_entries(
    tile: Tile,
    stats: RowStats,
    seed: int,
    first: int,
    cuts: Tensor,
    slots: int,
    gradient: TileGradient | None = None,
    grad_stats: StatsGrad | None = None,
) -> Entries:
    """Choose the entries of each row of a tile with all targets; see :class:`Backend`."""
    (rows, columns), device = tile.logits.shape, tile.logits.device
    entries = Entries.empty(rows, slots, device)
    groups = -(-sampled_blocks(rows, columns)[0] // _GROUP.value)
    height = min(rows, _MARKED_ROWS)
    words = torch.empty((height, groups, STRANDS), dtype=torch.int32, device=device)
    tail, squares = torch.empty(2, height, device=device)
    for part in (slice(start, start + height) for start in range(0, rows, max(height, 1))):
        of_part = {
            "tile": tile.rows(part),
            "stats": stats.rows(part),
            "gradient": None if gradient is None else gradient.rows(part),
            "grad_stats": None if grad_stats is None else grad_stats.rows(part),
            "cuts_ptr": cuts[part].contiguous(),
            "words_ptr": words,
            "tail_ptr": tail,
            "squares_ptr": squares,
            "groups": groups,
        }
        _launch(
            _mark_kernel,
            num_warps=_READING_WARPS,
            seed=seed,
            first_row=first + part.start,
            **of_part,
        )
        _launch(
            _list_kernel,
            num_warps=_LISTING_WARPS,
            logprobs_ptr=stats.logprobs[part].contiguous(),
            slots=slots,
            BLOCK=_LISTED_ENTRIES,
            **of_part,
            **{f"{name}_ptr": value[part] for name, value in entries._asdict().items()},
        )
    return entries
