"""Chooses the cut between kept entries and the tail for a given error."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.base import RowStats, StatsGrad, Tile, TileGradient
from grpo_kernels.backends.entries import NUM_CUTS, TINY, sampled_blocks
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

_LEAST_SQUARE = tl.constexpr(TINY**2)
_WEIGHED_ROWS = 1024  # at a time


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=POINTERS)
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
    least = (
        tl.cast(allowed, tl.float64) * num_rows * unit / tl.maximum(tl.sum(mass, axis=0), LEAST_CUT)
    )
    log_least = tl.log2(tl.minimum(tl.maximum(least, LEAST_CUT), 1.0).to(tl.float32))
    offs_k = tl.arange(0, BLOCK_K)
    cuts = tl.exp2(log_least * (1.0 - offs_k.to(tl.float32) / (NUM_CUTS - 1)))
    tl.store(cuts_ptr + offs_k, cuts, mask=offs_k < NUM_CUTS)
    tl.debug_barrier()  # other threads stored the weights that are read
    for start in range(0, num_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        mask = rows < num_rows
        weight = tl.load(weight_ptr + rows, mask=mask, other=0.0)
        tl.store(weight_ptr + rows, weight / unit.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=POINTERS)
def _pick_kernel(
    weight_ptr,  # (C,) fp32
    tried_ptr,  # (K,) fp32
    sums_ptr,  # (C, 2, K) fp32
    cuts_ptr,  # (C,) fp32
    num_rows,
    allowed,  # squared error of a row
    part,  # the sampled share of all blocks
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
        cuts = tl.where(weight > 0.0, cut / tl.maximum(weight, LEAST_CUT), ANY_ERROR_CUT)
        tl.store(cuts_ptr + rows, cuts, mask=rows < num_rows)


@triton.jit(do_not_specialize_on_alignment=POINTERS)
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
    num_active = tl.where(finite, num_columns, 0)
    weight = tl.load(weight_ptr + row)
    offs_k = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_K,), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for i in range(sampled):
        block = ((row + i * blocks // sampled) % blocks).to(tl.int32)
        columns = block * NUM_STRANDS + tl.arange(0, NUM_STRANDS)
        sizes = tl.maximum(entry_sizes(this, weight, columns, columns < num_active), 0.0)
        for k in tl.static_range(NUM_CUTS):
            tail = tl.where(sizes <= tl.load(cuts_ptr + k), sizes, 0.0)
            sums += tl.where(offs_k == k, tl.sum(tail, axis=0), 0.0)
            squares += tl.where(offs_k == k, tl.sum(tail * tail, axis=0), 0.0)
    sums_ptr += row * (2 * NUM_CUTS) + offs_k
    tl.store(sums_ptr, sums, mask=offs_k < NUM_CUTS)
    tl.store(sums_ptr + NUM_CUTS, squares, mask=offs_k < NUM_CUTS)


def tail_sums(
    tile: Tile,
    stats: RowStats,
    weight: Tensor,
    cuts: Tensor,
    gradient: TileGradient | None = None,
    grad_stats: StatsGrad | None = None,
) -> Tensor:
    """Sum the sampled tails of a tile with all targets; see :class:`Backend`."""
    rows, columns = tile.logits.shape
    blocks, sampled = sampled_blocks(rows, columns)
    sums = torch.empty((rows, 2, len(cuts)), device=tile.logits.device)
    launch_for_rows(
        kernel=_tail_sums_kernel,
        tile=tile,
        stats=stats,
        gradient=gradient,
        grad_stats=grad_stats,
        num_warps=READING_WARPS,
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
