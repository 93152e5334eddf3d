"""Entries of a row's gradient that matter, one program per row.

A row is read once for each cut that is tried, and then for the entries themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import WHOLE, Entries, RowStats, Tile
from grpo_kernels.backends.entries import GOLDEN, LEAST_POWER, READS, START
from grpo_kernels.backends.gpu_tiles import RowConfig, device_class, rows_are_aligned
from grpo_kernels.backends.triton import common
from grpo_kernels.backends.triton.math import LN2, expm1

_GOLDEN, _WHOLE, _READS = map(tl.constexpr, (GOLDEN, WHOLE, READS))
_START, _LEAST_POWER = map(tl.constexpr, (START, LEAST_POWER))
_NONE = tl.constexpr(1e-30)
_POINTERS = [*common.PER_ROW, *(f"{name}_ptr" for name in ("keys", "allowed", *Entries._fields))]


@triton.jit
def _sizes(row, columns, inner, VECTOR: tl.constexpr):
    """Return probabilities of all but the target, and their shares in the gradient; in units.

    Both are in the shape of :func:`common.by_thread`.
    """
    logits_ptr, num_active, target, anchor, f2, rest = row
    inside = columns < num_active
    x = tl.load(logits_ptr + columns, mask=inside, other=float("-inf"))
    others = columns != target
    if inner is not None:  # which turns -inf into a finite value
        others = others & inside
    p = tl.exp2(tl.fma(common.bounded(x, inner) - anchor, f2, -rest))
    p = tl.where(others, p, 0.0)
    size = p
    if inner is not None:
        size = p * common.softcap_slope(x, inner)
    return common.by_thread(p, VECTOR), common.by_thread(size, VECTOR)


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=_POINTERS)
def _extract_kernel(
    logits_ptr,  # (C, V)
    target_ptr,  # (C,) int64
    temperature_ptr,  # (C,) or None
    logp_ptr,  # (C,) fp32
    lse_ptr,  # (C,) fp64
    keys_ptr,  # (C,) int32
    allowed_ptr,  # (C,)
    ids_ptr,  # (C, slots) int32
    values_ptr,  # (C, slots) fp32
    used_ptr,  # (C,) int32
    error_ptr,  # (C,) fp32, as the next two
    error_l1_ptr,
    norm_ptr,
    stride_row,
    num_columns,
    slots,
    inner,
    outer,
    BLOCK_V: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_row
    ids_ptr += row * slots
    values_ptr += row * slots
    factor = common.row_factor(outer, temperature_ptr, row)
    slope = factor if inner is None else factor * inner
    target = tl.load(target_ptr + row).to(tl.int32)
    lse = tl.load(lse_ptr + row)
    finite = lse - lse == 0.0
    num_active = tl.where(finite, num_columns, 0)

    # Sizes are in a unit near the smallest cut, so that no square of them under- or overflows. This
    # power of two is about allowed^2 / (1 - p), the least cut that may be it.
    logp = tl.where(finite, tl.minimum(tl.load(logp_ptr + row), 0.0), 0.0)
    about = tl.maximum(-expm1(logp), 2.0**-30)  # where 1 - p is lost in the rounding of log p
    allowed = tl.load(allowed_ptr + row).to(tl.float32) / slope
    log2_unit = tl.floor(2.0 * tl.log2(allowed) - tl.log2(about))
    log2_unit = tl.minimum(tl.maximum(log2_unit, -60.0), 0.0)
    unit = tl.exp2(log2_unit) * slope
    allowed = allowed * tl.exp2(-log2_unit)
    at_unit = lse + log2_unit.to(tl.float64) * LN2
    anchor, f2, rest = common.unit_of(at_unit, factor)
    this = logits_ptr, num_active, target, anchor, f2, rest
    offs_v = common.tile_offsets(BLOCK_V, THREADS, VECTOR)
    zero = tl.zeros((THREADS,), tl.float32)

    # the row's cut, as ``_cuts`` of ``backends/entries.py`` finds it; all in units
    total = about * tl.exp2(-log2_unit)  # of the sizes, at most
    allowed = allowed * allowed
    least = tl.minimum(allowed / tl.maximum(total, _NONE), 2.0**60)
    most = tl.maximum(2.0 * least, 0.5 * total)
    tried = tl.sqrt(least * (least + _START * total))
    cut = 0.0 * tried
    for _read in range(_READS):
        slopes, errors = zero, zero
        for start in range(0, num_active, BLOCK_V):
            columns = start + offs_v
            _, size = _sizes(this, columns, inner, VECTOR)
            below = tl.where(size <= tried, size, 0.0)
            slopes += common.sum_of(below)
            errors += common.sum_of(below * (tried - below))
        error = tl.sum(errors, axis=0)
        ratio = allowed / tl.maximum(error, _NONE)
        cut = tl.maximum(cut, tried * tl.minimum(ratio, 1.0))
        power = error / tl.maximum(tried * tl.sum(slopes, axis=0), _NONE)
        tried = tried * tl.exp2(tl.maximum(power, _LEAST_POWER) * tl.log2(ratio))
        tried = tl.maximum(tl.minimum(tried, most), cut)

    # all entries but the target's, in slots from 1 on
    in_order = tl.arange(0, BLOCK_V)
    drawn, squared, magnitudes, mass, squares = zero, zero, zero, zero, zero
    count = tl.zeros((), tl.int32)
    large_count = tl.zeros((), tl.int32)
    key = tl.load(keys_ptr + row).to(tl.uint32, bitcast=True)
    draws = 2.0**24 / cut  # of a size: so many of 2**24 numbers of a hash keep it
    for start in range(0, num_active, BLOCK_V):
        columns = start + offs_v
        p, size = _sizes(this, columns, inner, VECTOR)
        mass += common.sum_of(p)
        squares += common.sum_of(size * size)
        hashed = common.by_thread(columns, VECTOR).to(tl.uint32) * _GOLDEN + key
        # then the end of MurmurHash3
        hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B
        hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35
        hashed = (hashed ^ (hashed >> 16)) >> 8
        large = size > cut
        kept = large | (hashed.to(tl.int32).to(tl.float32) < size * draws - 0.5)
        value = tl.where(kept, tl.maximum(size, cut), 0.0)
        error_of = value - size
        drawn += common.sum_of(tl.where(large, 0.0, size))
        squared += common.sum_of(error_of * error_of)
        magnitudes += common.sum_of(tl.abs(error_of))
        found = tl.sum(common.sum_of(kept.to(tl.int32)), axis=0)
        if found > 0:
            flags = tl.reshape(kept.to(tl.int32), (BLOCK_V,))
            slot = count + tl.cumsum(flags, axis=0)
            fits = (flags != 0) & (slot < slots)
            tl.store(ids_ptr + slot, start + in_order, mask=fits)
            tl.store(values_ptr + slot, tl.reshape(value, (BLOCK_V,)) * -unit, mask=fits)
            large_count += tl.sum(common.sum_of(large.to(tl.int32)), axis=0)
            count += found
    drawn_count = tl.sum(drawn, axis=0) / tl.maximum(cut, _NONE)
    expected = large_count + drawn_count + 4.0 * tl.sqrt(drawn_count)
    at_target = tl.sum(mass, axis=0)
    if inner is not None:
        at = tl.load(logits_ptr + target, mask=finite, other=0.0)
        at_target = at_target * common.softcap_slope(at.to(tl.float32), inner)
    row_fits = finite & (1.0 + expected <= slots) & (1 + count <= slots)
    tl.store(ids_ptr, target)
    tl.store(values_ptr, at_target * unit)
    tl.store(used_ptr + row, tl.where(row_fits, 1 + count, _WHOLE))
    error = tl.sqrt(tl.sum(squared, axis=0)) * unit
    tl.store(error_ptr + row, tl.where(row_fits, error, 0.0))
    tl.store(error_l1_ptr + row, tl.where(row_fits, tl.sum(magnitudes, axis=0) * unit, 0.0))
    norm = tl.sqrt(at_target * at_target + tl.sum(squares, axis=0)) * unit
    tl.store(norm_ptr + row, norm)


def config_for(dtype: torch.dtype, device: str, aligned: bool) -> RowConfig:
    """Return the tile of logits of ``dtype`` on a class of devices: eight columns a thread."""
    if not aligned:  # loaded one by one, which takes more registers: fewer threads share them
        return RowConfig(num_warps=4, depth=1).on(device)
    return RowConfig(num_warps=8, depth=dtype.itemsize // 2).on(device)


def extract_entries(
    tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int
) -> Entries:
    """Choose the entries of each row of a tile with all targets; see :class:`Backend`."""
    logits, aligned = tile.logits, rows_are_aligned(tile.logits)
    config = config_for(logits.dtype, device_class(logits.device), aligned)
    found = Entries.empty(len(logits), slots, logits.device)
    common.launch_rows(
        _extract_kernel,
        tile,
        config,
        logp_ptr=stats.logp.contiguous(),
        lse_ptr=stats.lse.contiguous(),
        keys_ptr=keys.contiguous(),
        allowed_ptr=allowed.contiguous(),
        slots=slots,
        **{f"{name}_ptr": value for name, value in found._asdict().items()},
        **config.blocks(logits.dtype, aligned),
    )
    return found
