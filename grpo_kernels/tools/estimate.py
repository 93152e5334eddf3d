"""Peak memory of a loss at a head: formulas over the plan of the call. Nothing is run."""

from __future__ import annotations

from grpo_kernels.backends import BACKENDS
from grpo_kernels.engine import chunk_height, tile_height, tile_shape
from grpo_kernels.head import leading_dim
from grpo_kernels.schedule import FORMED_ROWS, keeps_gradients
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
    narrow = call.frozen or (single and call.dtype != FP16 and not call.cast)
    dweight = call.dweight if narrow else call.elements * WIDE
    pairs = ((dhidden, call.rows), (dweight, call.dweight))
    return dhidden + dweight, sum(end for size, end in pairs if size != end)


def _kept_gradients(call: Call, pitch: int) -> int:
    """Estimate one pass that keeps the gradients of all logits, as with Triton, or return 0."""
    plan, width = call.plan, call.dtype.itemsize
    readable = call.dtype in BACKENDS["triton"].logp_gradients and call.options.bounded is None
    kept = keeps_gradients(plan.route, plan.head, plan.needs, call.tokens)
    if not (kept and readable) or call.device == "cpu":
        return 0
    logits = pitch * (FORMED_ROWS + call.tokens * width / plan.route.logits.itemsize)
    return int(logits) + call.wide_rows + call.dhidden + call.dweight


def _ours(call: Call) -> int:
    """Estimate one pass, or two by what is kept between them."""
    tokens, route, saving = call.tokens, call.plan.route, call.plan.saving
    bounded, kept, wide = call.options.bounded, saving.nbytes, call.wide_rows
    sparse = bounded is not None and not bounded.exact_weight
    rounded_rows = call.rows if call.rows != wide else 0
    # a tile of logits, and what forms it
    most = route.tile_rows // (1 + bool(call.teacher))  # rows of each of two tiles
    height = min(tokens, chunk_height(tokens, most, route.block))
    pitch = leading_dim(route.columns, route.logits, route.device) * route.logits.itemsize
    tile = tile_height(height, most, route.device) * pitch
    logits = tile * (1 + bool(call.teacher)) + call.cast
    if call.name == "one_pass":
        # the weight's gradient is one GEMM where the logits are one tile, or entries
        single = tokens <= most or sparse
        sums, rounded = _sums(call, single)
        if not single and not call.frozen:
            logits += _copies(call, height * (call.vocabulary + call.hidden))
        if bounded is not None:  # entries, of several chunks joined
            logits += kept if height == tokens else 2 * kept
        return max(sums + max(logits, rounded), _kept_gradients(call, pitch))
    # logits formed again, a slice of the vocabulary at a time, and dweight: a slice of it is
    # summed apart where its own dtype would round the sums
    elements = route.tile_rows * route.columns
    rows, columns = tile_shape(tokens, route.columns, elements, route.block)
    again = call.cast + min(rows, tokens) * columns * route.logits.itemsize + call.dweight
    rounds = (tokens > rows and call.weight < call.elements * WIDE) or call.dtype == FP16
    again += columns * call.hidden * WIDE if rounds and not call.frozen else 0
    again += _copies(call, (min(rows, tokens) + call.hidden) * columns)
    sums, rounded = _sums(call, single=True)
    # the forward has a tile only where no GEMM comes with its statistics
    no_tile = BACKENDS["cpu"].unavailable() is None if call.device == "cpu" else rounded_rows
    forward = call.cast + (0 if no_tile else tile)
    sparse_head = kept + sums + max(call.cast, rounded)
    of_entries = sparse_head if sparse or call.frozen else call.dhidden + max(kept, again)
    found = 2 * (kept * height // tokens)  # entries of a chunk, as they are found
    phases = {  # what is there in turn
        "nothing": (forward, again + wide, call.dweight + wide + rounded_rows),
        # whose rows the backward multiplies
        "dhidden": (max(kept, call.dhidden) + logits, kept + wide + rounded_rows),
        # the backward is the GEMMs of the gradients alone
        "dlogits": (kept + logits, kept + sums + max(call.cast + wide, rounded)),
        # which are there twice, as kept and as used
        "entries": (kept + logits + found, kept + of_entries),
    }
    return max(phases[saving.kind])
