"""Peak memory of a loss at a head, by formulas over the plan of the call. Nothing is run.

A run on fake tensors could not replace the formulas: the search for a budget needs the memory of
many token counts, on devices that are not here. ``tests/tools/test_plan.py`` compares them with
what steps allocate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from grpo_kernels.backends import BACKENDS
from grpo_kernels.engine import Bounded, Route, chunk_height, tile_height, tile_shape
from grpo_kernels.head import leading_dim
from grpo_kernels.tools.call import FP16, FP32_BYTES, Call
from grpo_kernels.tools.machine import native_isas

# trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
_TRL_ROWS = 4096
_TRL_COLUMNS = 32768


def growth(call: Call) -> int:
    """Return the peak bytes of one forward and backward, in addition to the inputs."""
    if call.options.bounded is not None:
        return max(call.returned, _bounded(call, call.options.bounded))
    formulas = {
        "eager": _eager,
        "trl": _trl,
        "one_pass": _one_pass,
        "two_pass": _two_pass,
        "exponentials": _exponentials,
    }
    return max(call.returned, formulas[call.name](call))


def total(call: Call) -> int:
    """Return the peak bytes of one forward and backward, with the inputs."""
    return call.inputs + growth(call)


def _eager(call: Call) -> int:
    """Estimate full logits: ``F.linear``, ``log_softmax(dtype=float32)``, ``gather``, autograd."""
    elements = call.tokens * call.vocabulary
    logits = elements * call.dtype.itemsize
    logprobs = elements * FP32_BYTES
    # only CUDA's fp16 kernel writes the gradient of its input in 16 bits
    dlogits = logits if call.dtype == FP16 and call.device != "cpu" else logprobs
    dweight = 0 if call.frozen else call.elements * call.dtype.itemsize
    gradients = call.rows + dweight
    peak = max(
        # the gradient of the log-softmax is dense, though zero except at the targets
        call.softcap * logits + 2 * logprobs + dlogits,
        logits + gradients,
        gradients + (call.dweight if call.cast else 0),  # dweight in two dtypes
    )
    return call.cast + peak  # autocast keeps its copy to the end


def _trl(call: Call) -> int:
    """Estimate the backward of ``ChunkedLogProbFunction``: tiles of logits, fp32 gradient sums."""
    width = call.dtype.itemsize
    rows = min(call.tokens, _TRL_ROWS)
    columns = min(call.vocabulary, _TRL_COLUMNS)
    slices = tile = 0
    if call.cast:  # slices of the cast weight: the current one, and at times the previous one
        several = call.tokens > rows or call.vocabulary > columns
        slices = (1 + several) * columns * call.hidden * width
    if call.device == "cpu":  # in fp32: scores, softmaxes and gradients of a tile, and a flag
        tile = rows * columns * (FP32_BYTES * (7 + call.softcap) + 1)
    dweight = _weight_sum(call)
    kept = call.fp32_rows + dweight + rows * _TRL_COLUMNS * width + slices
    return kept + max(_rounded(call, call.fp32_rows, dweight), tile)


def _one_pass(call: Call) -> int:
    chunk = _chunk(call)
    dweight = _weight_sum(call, of_one_gemm=chunk.is_only)
    rounded = _rounded(call, call.dhidden, dweight)
    return call.dhidden + dweight + max(_summing(call, chunk), rounded)


def _exponentials(call: Call) -> int:
    """Estimate one pass that keeps the exponentials of all logits for its backward."""
    route = call.plan.route
    rows = -(-call.tokens // route.block) * route.block
    kept = rows * _row_bytes(route, call.dtype)
    # the scaled hidden states, and before them a block of a product in fp32
    return kept + call.cast + 2 * call.rows + call.dweight


def _two_pass(call: Call) -> int:
    """Estimate two passes, depending on what is kept between them."""
    formulas = {
        "nothing": _keeps_nothing,
        "dhidden": _keeps_dhidden,
        "dlogits": _keeps_dlogits,
    }
    return formulas[call.plan.saved.kind](call, _chunk(call).nbytes)


def _keeps_nothing(call: Call, tile: int) -> int:
    return max(
        tile if _statistics_take_a_tile(call) else call.cast,
        _weight_from_new_logits(call) + call.fp32_rows,
        call.dweight + _sum_and_rounded_rows(call),
    )


def _keeps_dhidden(call: Call, tile: int) -> int:
    """Estimate a backward that multiplies the kept gradient by the loss's gradient."""
    kept = call.plan.saved.nbytes
    return max(max(kept, call.dhidden) + tile, kept + _sum_and_rounded_rows(call))


def _keeps_dlogits(call: Call, tile: int) -> int:
    """Estimate a backward that consists only of the GEMMs of the gradients."""
    dweight = _weight_sum(call, of_one_gemm=True)
    rounded = _rounded(call, call.dhidden, dweight)
    backward = call.dhidden + dweight + max(call.cast + call.fp32_rows, rounded)
    return call.plan.saved.nbytes + max(tile, backward)


def _bounded(call: Call, bounded: Bounded) -> int:
    """Estimate a sparse backward, at most: as if every row needed more entries than it may have.

    The logits of such rows are computed again, and their gradients stay in fp32 until the end.
    """
    chunk = _chunk(call)
    kept = call.plan.saved.nbytes
    copies = kept // 2  # of the kept values, or of the kept ids
    is_exact = bounded.exact_weight and not call.frozen
    sparse = 0 if is_exact or call.frozen else call.elements * FP32_BYTES
    products = call.cast + (_sorted_entries(call, kept) if sparse else 0)
    of_weight = 0
    if call.name == "two_pass":
        chunk_entries = kept * chunk.rows // call.tokens  # copied into what is kept
        forward = chunk.nbytes + kept + chunk_entries
        before = kept + copies
        products += copies
        dweight = call.dweight if is_exact else sparse
        if is_exact:
            of_weight = before + call.fp32_rows + _weight_from_new_logits(call)
        end = kept
    else:
        exact = _weight_sum(call, of_one_gemm=chunk.is_only) if is_exact else 0
        forward = exact + _summing(call, chunk) + kept
        before = exact + (kept if chunk.is_only else 2 * kept)
        dweight = exact + sparse
        end = 0
    # the exact rows and their gradient, which is scattered into the gradient of all rows
    at_rows = max(_slice(call).nbytes, call.fp32_rows, products)
    of_rows = before + sparse + call.rows + call.fp32_rows + at_rows
    end += call.fp32_rows + dweight + _rounded(call, call.fp32_rows, dweight)
    return max(forward, of_rows, of_weight, end)


class _Chunk(NamedTuple):
    """The rows of which a forward holds the logits at a time."""

    rows: int
    is_only: bool  # there is no other chunk
    nbytes: int  # of their logits, of a teacher's, and of the weight's copy to compute them


def _chunk(call: Call) -> _Chunk:
    route = call.plan.route
    tiles = 2 if call.teacher else 1
    most = route.tile_rows // tiles
    rows = min(call.tokens, chunk_height(call.tokens, most, route.block))
    height = tile_height(rows, most, route.device)
    nbytes = tiles * height * _row_bytes(route, route.logits) + call.cast
    return _Chunk(rows=rows, is_only=call.tokens <= most, nbytes=nbytes)


class _Slice(NamedTuple):
    """The part of the logits that a backward computes again at a time."""

    rows: int
    columns: int
    nbytes: int  # of these logits, and of the weight's copy to compute them


def _slice(call: Call) -> _Slice:
    route = call.plan.route
    elements = route.tile_rows * route.columns
    rows, columns = tile_shape(call.tokens, route.columns, elements, route.block)
    height = min(rows, call.tokens)
    logits = height * columns * route.logits.itemsize
    copies = _copies(call, (height + call.hidden) * columns)
    return _Slice(rows=rows, columns=columns, nbytes=logits + copies + call.cast)


def _row_bytes(route: Route, dtype: torch.dtype) -> int:
    return leading_dim(route.columns, dtype, route.device) * dtype.itemsize


def _copies(call: Call, elements: int) -> int:
    """Return the bytes of 16-bit factors that oneMKL copies for an fp32 GEMM without AMX."""
    copies = call.device == "cpu" and call.is_narrow and "amx" not in native_isas()[:1]
    return FP32_BYTES * elements if copies else 0


def _summing(call: Call, chunk: _Chunk) -> int:
    """Return the bytes of a chunk's logits, and of the factors copied to sum dweight."""
    if chunk.is_only or call.frozen:
        return chunk.nbytes
    return chunk.nbytes + _copies(call, chunk.rows * (call.vocabulary + call.hidden))


def _weight_sum(call: Call, of_one_gemm: bool = False) -> int:
    """Return the bytes of the weight's gradient before it is rounded to the weight's dtype."""
    rounds_at_once = of_one_gemm and call.dtype != FP16 and not call.cast
    return call.dweight if call.frozen or rounds_at_once else call.elements * FP32_BYTES


def _rounded(call: Call, dhidden: int, dweight: int) -> int:
    """Return the bytes of the gradients in a dtype other than the one they were summed in."""
    rows = 0 if dhidden == call.rows else call.rows
    return rows + (0 if dweight == call.dweight else call.dweight)


def _sum_and_rounded_rows(call: Call) -> int:
    return call.fp32_rows + (call.rows if call.is_narrow else 0)


def _statistics_take_a_tile(call: Call) -> bool:
    """Return whether no kernel computes the statistics without a tile of logits."""
    if call.device == "cpu":
        return BACKENDS["cpu"].unavailable() is not None
    return not call.is_narrow


def _weight_from_new_logits(call: Call) -> int:
    """Return the bytes of dweight, and of computing it from logits that are computed again.

    A slice of it is summed in a separate fp32 buffer if its own dtype would round the sums.
    """
    part = _slice(call)
    rounds = call.tokens > part.rows and call.weight < call.elements * FP32_BYTES
    apart = 0
    if (rounds or call.dtype == FP16) and not call.frozen:
        apart = part.columns * call.hidden * FP32_BYTES
    return part.nbytes + call.dweight + apart


def _sorted_entries(call: Call, kept: int) -> int:
    """Return the bytes to sort entries by column; ``kept`` has eight bytes for each entry."""
    if call.device == "cpu":
        return kept  # the row and the value, four bytes each
    return kept * 17 // 8  # a flag, the column, the sorted column, and the order in int64
