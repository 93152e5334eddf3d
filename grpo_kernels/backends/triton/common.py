"""Shared by the Triton row kernels: the transform, its host-side arguments, online sums, checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from grpo_kernels.backends.base import EXTRAS, STATS, RowStats, Tile
from grpo_kernels.backends.gpu_tiles import NOT_FUSED, LinearConfig, RowConfig, device_class
from grpo_kernels.backends.triton.math import LN2, LOG2_E, expm1, tanh
from grpo_kernels.head import Transform

# Pointers to one value per row: as slices of longer vectors their alignment varies, which does not
# matter but would cause recompilations.
_INPUTS = ("target", "temperature", "y_target", "dlogp", "dentropy")
PER_ROW = [f"{name}_ptr" for name in (*_INPUTS, *STATS, *EXTRAS)]
OPTIONS = {"num_warps": 4, **NOT_FUSED}  # for kernels without a tile to choose

# exp2 below it is 0 in fp32; bounds e * t, which would be 0 * -inf for a score of -inf
LOG2_UNDERFLOW = tl.constexpr(-150.0)


@triton.jit
def row_factor(score_scale, temperature_ptr, row):
    """Return the factor on a row's bounded logits: ``score_scale``, over the row's temperature."""
    score_scale = tl.cast(score_scale, tl.float32)  # a Python float in the interpreter
    if temperature_ptr is not None:
        score_scale = score_scale / tl.load(temperature_ptr + row).to(tl.float32)
    return score_scale


@triton.jit
def bounded(x, cap_scale):
    """Return the bounded logits, to multiply by :func:`row_factor`, from raw ``x`` of any shape."""
    x = x.to(tl.float32)
    if cap_scale is not None:
        x = tanh(x * cap_scale)
    return x


@triton.jit
def softcap_slope(x, cap_scale):
    """Return the derivative of a softcap's :func:`bounded` with respect to ``cap_scale * x``."""
    y = bounded(x, cap_scale)
    return 1.0 - y * y


# The online-softmax update (Milakov and Gimelshein, arXiv:1805.02867) of every kernel: ``raised``
# raises the peak for new scores, ``folded`` adds a tile of scores, ``rebased`` moves partial sums.
# ``total`` = sum e, ``moment`` = sum e t and ``squares`` = sum e^2, with t = f2 (y - peak) and
# e = 2**t for the scores y. A tile is (rows, columns), with sums per row, or one row as (depth,
# threads, vector), with sums per thread: sums of a whole tile then stay within a thread.


@triton.jit
def rebased(
    peak,
    total,
    moment,
    squares,
    base,
    f2,
):
    """Move online-softmax sums from ``peak`` to ``base`` >= ``peak``; any shape."""
    # before the first score the sums are 0, and -inf - -inf would be NaN
    drop = tl.where(peak == float("-inf"), 0.0, (peak - base) * f2)
    shrink = tl.exp2(drop)
    return shrink * total, shrink * (moment + drop * total), shrink * shrink * squares


@triton.jit
def tile_offsets(BLOCK_V: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr):
    """Return the columns of a tile of one row as it is loaded, (depth, threads * vector)."""
    # With three axes, depth and threads would be equally contiguous, and the Triton version would
    # decide which of them maps to the lanes of a warp.
    depth = tl.arange(0, BLOCK_V // (THREADS * VECTOR))[:, None]
    return depth * (THREADS * VECTOR) + tl.arange(0, THREADS * VECTOR)[None, :]


@triton.jit
def by_thread(tile, VECTOR: tl.constexpr):
    """Reshape a tile from the layout of :func:`tile_offsets` to (depth, threads, vector)."""
    return tl.reshape(tile, (tile.shape[0], tile.shape[1] // VECTOR, VECTOR))


@triton.jit
def as_loaded(tile):
    """Reshape a tile (depth, threads, vector) to the layout of :func:`tile_offsets`."""
    return tl.reshape(tile, (tile.shape[0], tile.shape[1] * tile.shape[2]))


@triton.jit
def spread(x, tile):
    """Return the values of a tile's rows, or threads, in a shape that broadcasts with the tile."""
    if len(tile.shape) == 2:
        x = tl.expand_dims(x, 1)
    else:
        x = tl.expand_dims(tl.expand_dims(x, 0), 2)
    return x


@triton.jit
def sum_of(tile):
    """Sum a tile over each of its rows, or threads."""
    if len(tile.shape) == 3:
        tile = tl.sum(tile, axis=0)
    return tl.sum(tile, axis=1)


@triton.jit
def max_of(tile):
    """Return the maximum of a tile over each of its rows, or threads."""
    if len(tile.shape) == 3:
        tile = tl.max(tile, axis=0)
    return tl.max(tile, axis=1)


@triton.jit
def raised(
    peak,
    total,
    moment,
    squares,
    other_peak,
    f2,
):
    """Move sums to the larger of two peaks; return it, a finite base for scores, and the sums."""
    new_peak = tl.maximum(peak, other_peak)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # no -inf - -inf
    total, moment, squares = rebased(
        peak=peak, total=total, moment=moment, squares=squares, base=base, f2=f2
    )
    return new_peak, base, total, moment, squares


@triton.jit
def folded(
    y,
    base,
    total,
    moment,
    squares,
    f2,
    EXTRAS: tl.constexpr,
):
    """Add a tile of scores to sums relative to ``base``; return them, and the tile's e."""
    t = (y - spread(base, y)) * spread(f2, y)
    e = tl.exp2(t)
    moment += sum_of(e * tl.maximum(t, LOG2_UNDERFLOW))
    total += sum_of(e)
    if EXTRAS:
        squares += sum_of(e * e)
    return total, moment, squares, e


@triton.jit
def unit_of(score, factor):
    """Return (anchor, rest) to subtract an fp64 score: log2 is ``f2 (y - anchor) - rest``."""
    # The difference from an fp32 anchor near the score is exact where it matters, and ``rest`` is
    # the remainder, so that a large offset of the logits costs no digits.
    wide = factor.to(tl.float64)
    anchor = tl.where(wide == 0.0, 0.0, score / wide).to(tl.float32)
    rest = (score - anchor.to(tl.float64) * wide) * LOG2_E
    return anchor, factor * LOG2_E, rest.to(tl.float32)


@triton.jit
def store_stats(
    results,
    at,
    mask,
    y_target,
    peak,
    total,
    moment,
    factor,
    extras,
):
    """Store statistics of rows; return logp. ``extras``: sum e^2, is_top1, the least y; or None."""
    # the total is fp64: for a nearly certain target it is barely more than 1
    logprobs_ptr, entropy_ptr, lse_ptr, is_top1_ptr, sum_sq_ptr, max_ptr, min_ptr = results
    rounded = total.to(tl.float32)
    rest = (total - rounded.to(tl.float64)).to(tl.float32)
    # a row of only -inf has total 0: its lse is -inf, not NaN
    log_total = tl.log(rounded) + rest / tl.where(rounded == 0.0, 1.0, rounded)
    moment = moment * LN2
    lse = peak.to(tl.float64) * factor.to(tl.float64) + log_total.to(tl.float64)
    logp = (y_target - peak) * factor - log_total
    entropy = log_total - moment / rounded
    tl.store(logprobs_ptr + at, logp, mask=mask)
    tl.store(entropy_ptr + at, entropy, mask=mask)
    tl.store(lse_ptr + at, lse, mask=mask)
    if extras is not None:  # a NaN among the logits makes all of them NaN
        squares, is_top1, least = extras
        collision = squares / (rounded * rounded)
        largest = peak * factor
        least = least * factor
        tl.store(sum_sq_ptr + at, tl.where(collision > 1.0, 1.0, collision), mask=mask)
        tl.store(is_top1_ptr + at, is_top1, mask=mask)
        tl.store(max_ptr + at, tl.where(rounded == rounded, largest, rounded), mask=mask)
        tl.store(min_ptr + at, tl.where(rounded == rounded, least, rounded), mask=mask)
    return logp


@triton.jit
def at_the_target(
    logp,
    anchor,
    peak,
    total,
    factor,
):
    """Return a row's ``E`` at its target, its unit, and whether both are finite.

    ``E = exp(z - anchor)``, and ``exp(-log_sum)`` turns it into probabilities; the target's entry
    represents ``p - 1`` instead, accurate also for p near 1.
    """
    log_sum = (peak - anchor) * factor + tl.log(total.to(tl.float32))
    finite = (log_sum - log_sum == 0.0) & (logp - logp == 0.0)
    unit = tl.where(finite, -factor * tl.exp(-log_sum), float("nan"))
    return expm1(logp) * tl.exp(log_sum), unit, finite


def pointers(stats: RowStats) -> dict[str, Tensor | None]:
    """Return the statistics that kernels fill as their arguments."""
    return {f"{name}_ptr": getattr(stats, name) for name in (*STATS, *EXTRAS)}


def transform_arguments(transform: Transform, like: Tensor) -> dict[str, object]:
    """Return ``transform`` as the scales in ``z = score_scale * tanh(cap_scale * x)``.

    Without a softcap ``cap_scale`` is None, and ``z = score_scale * x``.
    """
    cap_scale = None
    score_scale = float(transform.logit_scale)
    if transform.softcap is not None:
        cap_scale = transform.logit_scale / transform.softcap
        score_scale = float(transform.softcap)
    temperature = transform.temperature
    if not isinstance(temperature, Tensor):
        return {
            "temperature_ptr": None,
            "cap_scale": cap_scale,
            "score_scale": score_scale / temperature,
        }
    assert temperature.shape == like.shape[:1] and temperature.device == like.device, temperature
    return {
        "temperature_ptr": temperature.contiguous(),
        "cap_scale": cap_scale,
        "score_scale": score_scale,
    }


@contextlib.contextmanager
def launching(config: RowConfig | LinearConfig, tensor: Tensor) -> Iterator[None]:
    """Launch a kernel on the tensor's device; the error for a tile that does not fit names it."""
    try:
        with torch.cuda.device_of(tensor):  # Triton launches on the current device
            yield
    except OutOfResources as error:
        raise RuntimeError(
            f"{error} {config} of grpo_kernels/backends/gpu_tiles.py does not fit "
            f"{device_class(tensor.device)}; `make gpu-tune` measures tiles that do"
        ) from error


def launch_rows(kernel: Any, tile: Tile, config: RowConfig, **arguments: object) -> None:
    """Launch a program for each row of a tile; ``arguments`` replace those of its transform."""
    logits, target, transform = tile
    assert logits.stride(1) == 1 or logits.shape[1] <= 1, logits.stride()
    assert logits.dtype != torch.float64, "unsuited"
    assert target.shape == logits.shape[:1] and target.dtype == torch.int64, target
    if not len(logits):
        return
    with launching(config, logits):
        kernel[(len(logits),)](
            logits_ptr=logits,
            target_ptr=target.contiguous(),
            stride_row=logits.stride(0),
            num_columns=logits.shape[1],
            **config.options,
            **{**transform_arguments(transform, logits), **arguments},
        )
