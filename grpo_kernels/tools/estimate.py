"""Peak memory of a loss at a head: formulas over the plan of the call. Nothing is run."""

from __future__ import annotations

from typing import NamedTuple

from grpo_kernels.backends import BACKENDS
from grpo_kernels.engine import chunk_height, tile_height, tile_shape
from grpo_kernels.head import leading_dim
from grpo_kernels.tools.call import FP16, WIDE, Call
from grpo_kernels.tools.machine import native_isas

# trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
_TRL_ROWS, _TRL_COLUMNS = 4096, 32768


def growth(call: Call) -> int:
    """Return the bytes from the inputs alone to the peak of one forward and backward."""
    return max(call.returned, {"eager": _eager, "trl": _trl}.get(call.name, _ours)(call))


def total(call: Call) -> int:
    """Return the bytes at that peak, with the inputs."""
    return call.inputs + growth(call)


def _copies(call: Call, elements: int) -> int:
    """Return the bytes of 16-bit factors that oneMKL copies for a product in fp32, without AMX."""
    narrow = call.device == "cpu" and call.dtype.itemsize < WIDE
    return WIDE * elements if narrow and "amx" not in native_isas()[:1] else 0


def _eager(call: Call) -> int:
    """Estimate full logits: ``F.linear``, ``log_softmax(dtype=float32)``, ``gather``, autograd."""
    width, elements = call.dtype.itemsize, call.tokens * call.vocabulary
    logits, wide = elements * width, elements * WIDE
    # only CUDA's fp16 kernel writes the gradient of its input in 16 bits
    dlogits = logits if call.dtype == FP16 and call.device != "cpu" else wide
    gradients = call.rows + (0 if call.frozen else call.elements * width)
    return call.cast + max(  # autocast keeps its copy to the end
        # what a softcap saves, the log-softmax, its gradient (zeros but for the targets), dlogits
        call.softcap * logits + 2 * wide + dlogits,
        logits + gradients,
        gradients + (call.dweight if call.cast else 0),  # the weight's in two dtypes
    )


def _trl(call: Call) -> int:
    """Estimate the backward of ``ChunkedLogProbFunction``: tiles of logits, fp32 gradient sums."""
    width = call.dtype.itemsize
    rows, columns = min(call.tokens, _TRL_ROWS), min(call.vocabulary, _TRL_COLUMNS)
    several = call.tokens > rows or call.vocabulary > columns
    # of the weight, cast: the slice in use, and the one before it while this one is made
    slices = (1 + several) * columns * call.hidden * width if call.cast else 0
    # on a CPU in fp32: the scores, softmaxes and gradients of a tile, and a flag
    tile = rows * columns * (WIDE * (7 + call.softcap) + 1) if call.device == "cpu" else 0
    sums, rounded = _sums(call, wide=True)
    kept = sums + rows * _TRL_COLUMNS * width + slices
    return kept + max(rounded, tile)


def _sums(call: Call, single: bool = False, wide: bool = False) -> tuple[int, int]:
    """Return the bytes of both gradients as they are summed, and of those rounded at the end.

    ``single``: the weight's is of one GEMM, rounded once. ``wide``: all sums are fp32.
    """
    dhidden = call.wide_rows if wide else call.dhidden
    dweight = _summed_weight(call, single)
    return dhidden + dweight, _rounded(call, dhidden, dweight)


def _summed_weight(call: Call, single: bool) -> int:
    narrow = call.frozen or (single and call.dtype != FP16 and not call.cast)
    return call.dweight if narrow else call.elements * WIDE


def _rounded(call: Call, dhidden: int, dweight: int) -> int:
    """Return the bytes of the gradients that are not what they were summed in."""
    pairs = ((dhidden, call.rows), (dweight, call.dweight))
    return sum(end for size, end in pairs if size != end)


def _exponentials(call: Call) -> int:
    """Estimate one pass that keeps the exponentials of all logits for its backward."""
    route, width = call.plan.route, call.dtype.itemsize
    rows = -(-call.tokens // route.block) * route.block
    kept = rows * leading_dim(route.columns, call.dtype, route.device) * width
    # the hidden states times a factor each, and a block of a product in fp32 before
    return kept + call.cast + 2 * call.rows + call.dweight


def _ours(call: Call) -> int:
    if call.options.bounded is not None:
        return _bounded(call)
    ways = {"one_pass": _one_pass, "two_pass": _two_pass, "exponentials": _exponentials}
    return ways[call.name](call)


class _Tiles(NamedTuple):
    """The tiles of logits of ours: bytes, with the copy of the weight that forms them."""

    height: int  # rows of a chunk in the forward
    single: bool  # it is the only one
    forward: int  # bytes of a chunk's logits, and of those of a teacher
    rows: int  # of a slice of the vocabulary, whose logits are formed again
    columns: int
    again: int  # bytes of a slice's logits


def _tiles(call: Call) -> _Tiles:
    tokens, route = call.tokens, call.plan.route
    most = route.tile_rows // (1 + bool(call.teacher))  # rows of each of two tiles
    height = min(tokens, chunk_height(tokens, most, route.block))
    pitch = leading_dim(route.columns, route.logits, route.device) * route.logits.itemsize
    forward = tile_height(height, most, route.device) * pitch * (1 + bool(call.teacher))
    rows, columns = tile_shape(tokens, route.columns, route.tile_rows * route.columns, route.block)
    again = min(rows, tokens) * columns * route.logits.itemsize
    again += _copies(call, (min(rows, tokens) + call.hidden) * columns)
    return _Tiles(
        height=height,
        single=tokens <= most,
        forward=forward + call.cast,
        rows=rows,
        columns=columns,
        again=again + call.cast,
    )


def _one_pass(call: Call) -> int:
    tiles = _tiles(call)
    sums, rounded = _sums(call, tiles.single)
    return sums + max(_summing_tile(call, tiles), rounded)


def _summing_tile(call: Call, tiles: _Tiles) -> int:
    """Return the bytes of a chunk's logits and of what is beside them to sum the gradients."""
    sums_weight = not (tiles.single or call.frozen)
    elements = tiles.height * (call.vocabulary + call.hidden) if sums_weight else 0
    return tiles.forward + _copies(call, elements)


def _two_pass(call: Call) -> int:
    """Estimate two passes, by what is kept between them."""
    tiles, saving, wide = _tiles(call), call.plan.saving, call.wide_rows
    kept = saving.nbytes
    rounded_rows = call.rows if call.rows != wide else 0
    sums, rounded = _sums(call, single=True)
    # the forward has a tile only where no GEMM comes with its statistics
    no_tile = BACKENDS["cpu"].unavailable() is None if call.device == "cpu" else rounded_rows
    forward = call.cast if no_tile else tiles.forward
    again = _weight_again(call, tiles)
    phases = {  # what is there in turn
        "nothing": (forward, again + wide, call.dweight + wide + rounded_rows),
        # whose rows the backward multiplies
        "dhidden": (max(kept, call.dhidden) + tiles.forward, kept + wide + rounded_rows),
        # the backward is the GEMMs of the gradients alone
        "dlogits": (kept + tiles.forward, kept + sums + max(call.cast + wide, rounded)),
    }
    return max(phases[saving.kind])


def _weight_again(call: Call, tiles: _Tiles) -> int:
    """Return the bytes of dweight, and of what sums it from logits that are formed again.

    A slice of it is summed apart where its own dtype would round the sums.
    """
    rounds = call.tokens > tiles.rows and call.weight < call.elements * WIDE
    apart = (rounds or call.dtype == FP16) and not call.frozen
    return tiles.again + call.dweight + (tiles.columns * call.hidden * WIDE if apart else 0)


def _bounded(call: Call) -> int:
    """Estimate a backward by entries, at most: as if every row needed more than it may have.

    The logits of such rows are formed again, and their gradients are fp32 until the end.
    """
    bounded, tiles, kept = call.options.bounded, _tiles(call), call.plan.saving.nbytes
    assert bounded is not None
    exact, two_pass = bounded.exact_weight and not call.frozen, call.name == "two_pass"
    wide, sparse = call.wide_rows, 0 if exact or call.frozen else call.elements * WIDE
    copies = kept // 2  # of either the values or the ids among what is kept
    if two_pass:
        found = kept * tiles.height // call.tokens  # a chunk's entries, which are copied
        forward = tiles.forward + kept + found
        before, dweight = kept + copies, call.dweight if exact else sparse
    else:
        dweight = _summed_weight(call, tiles.single) if exact else sparse
        forward = dweight - sparse + _summing_tile(call, tiles) + kept
        before = dweight - sparse + (kept if tiles.single else 2 * kept)
    products = call.cast + two_pass * copies + (_sorted_entries(call, kept) if sparse else 0)
    # the rows that need more with their gradient, which is put among that of all rows
    of_rows = before + sparse + call.rows + wide + max(tiles.again, wide, products)
    of_weight = before + wide + _weight_again(call, tiles) if exact and two_pass else 0
    end = two_pass * kept + wide + dweight + _rounded(call, wide, dweight)
    return max(forward, of_rows, of_weight, end)


def _sorted_entries(call: Call, kept: int) -> int:
    """Return the bytes of entries by their columns; ``kept`` has eight bytes for each."""
    if call.device == "cpu":
        return kept  # the row and the value, four bytes each
    return kept * 17 // 8  # whether each is meant, its column, that sorted, and the order in int64
