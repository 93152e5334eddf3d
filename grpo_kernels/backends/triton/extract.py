"""Chooses the entries of a row's gradient: one read of the row marks them, a second kernel lists
the marked ones.

Marks are bits: a word of each strand covers 32 blocks, a sixteenth of the bytes of ``E``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import WHOLE, Entries, RowStats, StatsGrad, Tile, TileGradient
from grpo_kernels.backends.entries import GOLDEN, STRANDS, sampled_blocks
from grpo_kernels.backends.triton import common
from grpo_kernels.backends.triton.entry_sizes import (
    ANY_ERROR_CUT,
    LEAST_CUT,
    NUM_STRANDS,
    POINTERS,
    READING_WARPS,
    entry_sizes,
    launch_for_rows,
    row_values,
)
from grpo_kernels.backends.triton.math import expm1

_GOLDEN = tl.constexpr(GOLDEN)
_WHOLE = tl.constexpr(WHOLE)
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0
_GROUP = tl.constexpr(32)  # blocks, one for each bit of a word
_LISTING_WARPS = 4
_LISTED_ENTRIES = 512
_MARKED_ROWS = 512  # at a time: more only cost memory for the words


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
    """Set the bit of each strand that has an entry in a block."""
    words, left, squares = state
    columns = block * NUM_STRANDS + tl.arange(0, NUM_STRANDS)
    size = entry_sizes(this, scale, columns, None if end is None else columns < end)
    # as integers negative numbers are large, too: the target is an entry
    in_tail = size.to(tl.uint32, bitcast=True) <= _ONE
    share = tl.where(in_tail, size, 0.0)
    squares = tl.fma(share, share, squares)
    left -= share
    drawn = left <= 0.0
    left = tl.where(drawn, left + 1.0, left)
    words = tl.where(in_tail & (drawn == 0), words, words | bit)
    return words, left, squares


@triton.jit(do_not_specialize=["seed", "first_row"], do_not_specialize_on_alignment=POINTERS)
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
    values, finite = row_values(
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
    if not (finite & (cut < ANY_ERROR_CUT)):
        return
    scale = 1.0 / tl.maximum(cut, LEAST_CUT)
    strands = tl.arange(0, NUM_STRANDS)
    # the first draw of each strand, as in ``row_keys``
    bits = tl.load(lse_ptr + row).to(tl.int64, bitcast=True)
    key = _mixed((first_row + row).to(tl.uint32) * _GOLDEN + seed.to(tl.uint32))
    key = _mixed(_mixed(key ^ bits.to(tl.uint32)) ^ (bits >> 32).to(tl.uint32))
    hashed = _mixed(strands.to(tl.uint32) * _GOLDEN + key) >> 8
    start = (hashed.to(tl.int32).to(tl.float32) + 0.5) * 2.0**-24
    left = start
    squares = tl.zeros((NUM_STRANDS,), tl.float32)
    whole = num_columns // NUM_STRANDS
    words_ptr += row * groups * NUM_STRANDS + strands
    for group in range(groups):
        first = group * _GROUP
        bit = tl.full((), 1, tl.uint32)
        state = tl.zeros((NUM_STRANDS,), tl.uint32), left, squares
        for block in range(first, tl.minimum(first + _GROUP, whole)):
            state = _with_block(state=state, this=this, scale=scale, block=block, end=None, bit=bit)
            bit = bit << 1
        if (whole < first + _GROUP) & (whole * NUM_STRANDS < num_columns):  # the row's end is in it
            state = _with_block(
                state=state, this=this, scale=scale, block=whole, end=num_columns, bit=bit
            )
        words, left, squares = state
        tl.store(words_ptr + group * NUM_STRANDS, words.to(tl.int32, bitcast=True))
    tl.store(tail_ptr + row, tl.sum(start - left, axis=0))
    tl.store(squares_ptr + row, tl.sum(squares, axis=0))


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=POINTERS)
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
    values, finite = row_values(
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
    active = finite & (cut < ANY_ERROR_CUT)
    without = tl.where(cut < ANY_ERROR_CUT, _WHOLE, 0)
    cut = tl.maximum(tl.where(active, cut, 1.0), LEAST_CUT)
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
        if cap_scale is not None:  # the logit has been overwritten
            at_target = -x * slope
    ids_ptr += row * slots
    strands = tl.arange(0, NUM_STRANDS)
    words_ptr += row * groups * NUM_STRANDS + strands
    count = tl.zeros((), tl.int32)
    for group in range(tl.where(active, groups, 0)):
        words = tl.load(words_ptr + group * NUM_STRANDS).to(tl.uint32, bitcast=True)
        bits = words - ((words >> 1) & 0x55555555)  # counts of 2 bits, of 4, of 8, of all
        bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
        bits = (((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
        bits = bits.to(tl.int32)
        slot = count + tl.cumsum(bits, axis=0) - bits
        count += tl.sum(bits, axis=0)
        first = group * (_GROUP * NUM_STRANDS) + strands
        for _ in range(tl.max(bits, axis=0)):
            lowest = words & (~words + 1)
            bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            tl.store(ids_ptr + slot, first + bit * NUM_STRANDS, mask=(words != 0) & (slot < slots))
            slot += 1
            words = words & (words - 1)
    tl.debug_barrier()  # other threads stored the ids that are read

    values_ptr += row * slots
    offs = tl.arange(0, BLOCK)
    num_large = tl.zeros((BLOCK,), tl.int32)
    excess = tl.zeros((BLOCK,), tl.float32)
    large_squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tl.where(count <= slots, count, 0), BLOCK):
        listed = start + offs < count
        columns = tl.load(ids_ptr + start + offs, mask=listed, other=0)
        signed = entry_sizes(this=this, scale=scale, columns=columns, mask=listed, SIGNED=True)
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
        launch_for_rows(
            _mark_kernel,
            num_warps=READING_WARPS,
            seed=seed,
            first_row=first + part.start,
            **of_part,
        )
        launch_for_rows(
            _list_kernel,
            num_warps=_LISTING_WARPS,
            logprobs_ptr=stats.logprobs[part].contiguous(),
            slots=slots,
            BLOCK=_LISTED_ENTRIES,
            **of_part,
            **{f"{name}_ptr": value[part] for name, value in entries._asdict().items()},
        )
    return entries
