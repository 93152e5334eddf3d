"""Peak memory of our two schedules, by what their forward keeps for the backward."""

from __future__ import annotations

from dataclasses import replace

import torch

from grpo_kernels.backends import BACKENDS
from grpo_kernels.engine import row_block, tile_shape
from grpo_kernels.tools.estimate.call import WIDE, Call


def one_pass_call(call: Call) -> Call:
    """Return the call with the tile of one pass."""
    return replace(call, sums_dweight=not call.head.frozen)


def one_pass(call: Call) -> int:
    """Estimate gradients in the forward, chunk by chunk, which the backward scales."""
    call = one_pass_call(call)
    # the weight's gradient is one GEMM where the logits are one tile, or entries
    single = call.tokens <= call.fit or call.sparse_weight
    gradients = call.dhidden + call.dweight(single)
    tile = _tile(call)
    if call.bounded is not None:  # the gradient beside the logits; entries of the chunks, joined
        tile += call.tile + 2 * call.keeping.nbytes
    return gradients + max(tile, _rounded(call, single))


def _tile(call: Call) -> int:
    """Return the bytes of a tile of logits and of what forms it."""
    fp32 = WIDE in (call.logits.itemsize, call.head.width)
    return call.tile + call.head.cast + call.library(fp32_gemms=fp32)


def _rounded(call: Call, single: bool) -> int:
    """Return the bytes of those gradients that are rounded to their dtype at the end."""
    pairs = zip((call.dhidden, call.dweight(single)), call.returned, strict=True)
    return sum(result for gradient, result in pairs if gradient != result)


def two_pass(call: Call) -> int:
    """Estimate statistics first, and a backward by what is kept, or from logits formed again."""
    return _KEPT[call.keeping.what](call)


def _with_dhidden(call: Call) -> int:
    """Estimate a backward that multiplies the rows of a gradient that is there."""
    product = call.tokens * call.head.hidden * WIDE
    rounded = call.returned[0] if call.head.width < WIDE else 0
    kept = call.keeping.nbytes
    return max(max(kept, call.dhidden) + _tile(call), kept + product + rounded)


def _with_dlogits(call: Call) -> int:
    """Estimate the GEMMs of the gradients alone, in the backward."""
    head = call.head
    product = call.tokens * head.hidden * WIDE
    gradients = call.dhidden + call.dweight(single=True)
    return call.keeping.nbytes + max(
        call.tile + head.cast + call.library(fp32_gemms=True),
        gradients + max(head.cast + product, _rounded(call, single=True)),
    )


def _with_entries(call: Call) -> int:
    """Estimate sparse products; the entries are there twice, as kept and as used."""
    head, kept = call.head, call.keeping.nbytes
    if call.sparse_weight or head.frozen:
        gradients = call.dhidden + call.dweight(single=True)
        products = kept + gradients + max(head.cast, _rounded(call, single=True))
    else:
        of_head = head.cast + _slice(call) + call.returned[1]
        products = call.dhidden + max(kept, of_head)
    found = 2 * (kept * call.height // call.tokens)  # those of a chunk, as they are found
    return kept + max(_tile(call) + found, products)


def _with_nothing(call: Call) -> int:
    """Estimate a backward that forms the logits slice by slice."""
    head = call.head
    wide, dweight = call.tokens * head.hidden * WIDE, call.returned[1]
    rounded = call.returned[0] if head.width < WIDE else 0
    # the forward has a tile only where no GEMM comes with its statistics
    tiled = BACKENDS["cpu"].unavailable() if call.on_cpu else head.width == WIDE
    forward = call.tile if tiled else 0
    return call.library(fp32_gemms=head.width == WIDE) + max(
        head.cast + forward,
        head.cast + _slice(call) + wide + dweight,
        wide + rounded + dweight,
    )


def _slice(call: Call) -> int:
    """Return the bytes of a slice of logits that are formed again, and of its share of dweight."""
    head = call.head
    elements = call.fit * head.vocabulary
    rows, columns = tile_shape(call.tokens, head.vocabulary, elements, row_block(call.where))
    tile = min(rows, call.tokens) * columns * call.logits.itemsize
    # a slice of dweight is summed apart, where its own dtype would round the sums
    narrow = call.tokens > rows and head.weight_width < WIDE
    apart = head.trained and (narrow or head.dtype == torch.float16)
    return tile + (columns * head.hidden * WIDE if apart else 0)


_KEPT = {
    "nothing": _with_nothing,
    "dhidden": _with_dhidden,
    "dlogits": _with_dlogits,
    "entries": _with_entries,
}
