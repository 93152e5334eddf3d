"""Peak memory of a loss at a head: formulas over what the product's own planning decides.

Nothing is run. The tile, its chunks and what the forward keeps are asked of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from grpo_kernels.backends import BACKENDS, chunk_rows
from grpo_kernels.engine import (
    Needs,
    Route,
    RunOptions,
    SavedForBackward,
    chunk_height,
    tile_height,
    tile_shape,
)
from grpo_kernels.head import leading_dim
from grpo_kernels.schedule import adding_costs_more, summing_rows
from grpo_kernels.tools.head_shape import WIDE, HeadShape

# What MKL keeps once several threads have shared an fp32 GEMM: measured, and about the same for
# all shapes of a head. cuBLAS has its workspace since its first call.
_MKL_PANELS = 30 << 20
# trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
_TRL_ROWS, _TRL_COLUMNS = 4096, 32768
# GEMMs over the vocabulary, forward and backward, of what keeps nothing; a frozen head's: one fewer
_GEMMS = {"eager": 3, "trl": 4, "one_pass": 3}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of one forward and backward."""

    inputs: int  # hidden states and weight
    returned: int  # their gradients
    extra: int  # what else is alive at the peak
    shards: int  # of the weight and its gradient, beside the whole ones

    @property
    def growth(self) -> int:
        """Bytes from the inputs alone to the peak."""
        return self.returned + self.extra

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.shards + self.inputs + self.growth


@dataclass(frozen=True, kw_only=True)
class Call:
    """A loss of ``tokens`` valid tokens, all with a gradient.

    Raises:
        ValueError: a number or name is out of range; the message names the argument.
    """

    name: str  # "eager" | "trl" | "one_pass" | "two_pass", the schedules of ours
    head: HeadShape
    tokens: int  # T
    device: str = "cuda"  # | "cpu"
    options: RunOptions = field(default_factory=RunOptions)  # of ours
    sums_dhidden: bool = False  # over the ranks that share the vocabulary; of ours
    shards: int = 0  # bytes of the weight and its gradient that a rank has beside the whole ones
    copied: int = 0  # bytes of a collective's flat buffer, which is there while the logits are not

    def __post_init__(self) -> None:
        if self.name not in _PEAKS:
            raise ValueError(f"name: expected one of {', '.join(_PEAKS)}; got {self.name!r}")
        if self.tokens < 1:
            raise ValueError(f"tokens: expected a number > 0, got {self.tokens}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device: expected cpu or cuda; got {self.device!r}")

    @cached_property
    def memory(self) -> MemoryEstimate:
        """The estimate."""
        returned = self.hidden + self.head.dweight
        extra = max(self.copied, _PEAKS[self.name](self) - returned)
        return MemoryEstimate(self.hidden + self.head.weight, returned, extra, self.shards)

    @cached_property
    def route(self) -> Route:
        """The route of ours on such a device, with the tile of the schedule."""
        head, options, device = self.head, self.options, torch.device(self.device)
        size = options.max_workspace_bytes
        rows = chunk_rows(head.vocabulary, head.dtype, options.precision, device, size)
        route = Route(
            backend=BACKENDS["chunked"],  # all with tiles plan the same
            options=options,
            dtype=head.dtype,
            device=device,
            columns=head.vocabulary,
            tile_rows=rows,
            has_tile=True,
        )
        if self.name != "one_pass" or head.frozen or size is not None:
            return route
        rows = summing_rows(self.device, rows, head.hidden, head.dtype, route.logits)
        return replace(route, tile_rows=rows)

    @cached_property
    def saving(self) -> SavedForBackward:
        """What the forward keeps for the backward."""
        bounded, needs = self.options.bounded, Needs(hidden=True, weight=not self.head.frozen)
        if bounded is None and self.name in _GEMMS:
            return SavedForBackward(gemms=_GEMMS[self.name] - self.head.frozen)
        kept = SavedForBackward.of(self.tokens, self.head.hidden, self.route, needs)
        if bounded is not None and self.name == "one_pass":
            kept = kept.of_one_pass(needs, bounded)
        return kept

    def with_(self, **options: Any) -> Call:
        """Return the same with other options."""
        return replace(self, options=replace(self.options, **options))

    @property
    def default(self) -> str:
        """What ``schedule="auto"`` takes in place of :attr:`name`, for a loss of token scope."""
        num_chunks = -(-self.tokens // replace(self, name="one_pass").height)
        costly = adding_costs_more(self.device, self.head.dtype, self.tokens, num_chunks)
        return "two_pass" if costly and not self.head.frozen else "one_pass"

    @property
    def height(self) -> int:
        """Rows of a chunk of ours."""
        rows = chunk_height(self.tokens, self.route.tile_rows, self.route.block)
        return min(self.tokens, rows)

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states, and of their gradient."""
        return self.tokens * self.head.hidden * self.head.dtype.itemsize

    @property
    def wide_hidden(self) -> int:
        """Bytes of as many elements in fp32."""
        return self.tokens * self.head.hidden * WIDE


def _eager(call: Call) -> int:
    """Estimate full logits: ``F.linear``, ``log_softmax(dtype=float32)``, ``gather``, autograd."""
    head, elements = call.head, call.tokens * call.head.vocabulary
    logits, wide = elements * head.dtype.itemsize, elements * WIDE
    tanh = logits if head.softcap else 0  # saved for the backward
    # only CUDA's fp16 kernel writes the gradient of its input in 16 bits
    converts = head.dtype == torch.float16 and call.device != "cpu"
    narrow = 0 if head.frozen else head.size * head.dtype.itemsize
    base = head.cast + _library(call, head.dtype)  # autocast keeps its copy to the end
    return base + max(
        # the log-softmax, its gradient (zeros but for the targets), the gradient of its input
        tanh + 2 * wide + (logits if converts else wide),
        logits + call.hidden + narrow,
        call.hidden + narrow + (head.dweight if head.cast else 0),  # the weight's in two dtypes
    )


def _trl(call: Call) -> int:
    """Estimate the backward of ``ChunkedLogProbFunction``: tiles of logits, fp32 gradient sums."""
    head, width = call.head, call.head.dtype.itemsize
    rows, columns = min(call.tokens, _TRL_ROWS), min(head.vocabulary, _TRL_COLUMNS)
    several = call.tokens > rows or head.vocabulary > columns
    # of the weight, cast: the slice in use, and the one before it while this one is made
    slices = (1 + several) * columns * head.hidden * width if head.cast else 0
    sums, rounded = _sums(call, wide=True)
    # on a CPU in fp32: the scores, softmaxes and gradients of a tile, and a flag
    tile = rows * columns * (WIDE * (7 + head.softcap) + 1) if call.device == "cpu" else 0
    kept = sums + rows * _TRL_COLUMNS * width + slices
    return kept + _library(call, torch.float32) + max(rounded, tile)


def _one_pass(call: Call) -> int:
    """Estimate gradients in the forward, chunk by chunk, which the backward scales."""
    # the weight's gradient is one GEMM where the logits are one tile, or entries
    single = call.tokens <= call.route.tile_rows or _is_sparse(call)
    sums, rounded = _sums(call, single)
    logits = _logits(call)
    if call.options.bounded is not None:  # the gradient beside them; entries of the chunks, joined
        logits += _tile(call) + 2 * call.saving.nbytes
    return sums + max(logits, rounded)


def _two_pass(call: Call) -> int:
    """Estimate statistics first, and a backward by what is kept, or from logits formed again."""
    return _BACKWARDS[call.saving.kind](call, call.saving.nbytes)


def _with_dhidden(call: Call, kept: int) -> int:
    """Estimate a backward that multiplies the rows of a gradient that is there."""
    rounded = call.hidden if call.hidden != call.wide_hidden else 0
    return max(max(kept, _dhidden(call)) + _logits(call), kept + call.wide_hidden + rounded)


def _with_dlogits(call: Call, kept: int) -> int:
    """Estimate the GEMMs of the gradients alone, in the backward."""
    cast, (sums, rounded) = call.head.cast, _sums(call, single=True)
    forward = _tile(call) + cast + _library(call, torch.float32)
    return kept + max(forward, sums + max(cast + call.wide_hidden, rounded))


def _with_entries(call: Call, kept: int) -> int:
    """Estimate sparse products; the entries are there twice, as kept and as used."""
    head = call.head
    if _is_sparse(call) or head.frozen:
        sums, rounded = _sums(call, single=True)
        products = kept + sums + max(head.cast, rounded)
    else:
        products = _dhidden(call) + max(kept, head.cast + _slice(call) + head.dweight)
    found = 2 * (kept * call.height // call.tokens)  # those of a chunk, as they are found
    return kept + max(_logits(call) + found, products)


def _with_nothing(call: Call, kept: int) -> int:
    """Estimate a backward that forms the logits slice by slice."""
    head, narrow = call.head, call.head.dtype.itemsize < WIDE
    # the forward has a tile only where no GEMM comes with its statistics
    tiled = BACKENDS["cpu"].unavailable() if call.device == "cpu" else not narrow
    gradients = call.wide_hidden + head.dweight
    return _library(call, head.dtype) + max(
        head.cast + (_tile(call) if tiled else 0),
        head.cast + _slice(call) + gradients,
        gradients + (call.hidden if narrow else 0),
    )


_BACKWARDS: dict[str, Callable[[Call, int], int]] = {
    "nothing": _with_nothing,
    "dhidden": _with_dhidden,
    "dlogits": _with_dlogits,
    "entries": _with_entries,
}
_PEAKS = {"eager": _eager, "trl": _trl, "one_pass": _one_pass, "two_pass": _two_pass}


def _library(call: Call, *dtypes: torch.dtype) -> int:
    """Return the bytes that the library of a CPU keeps for GEMMs of these dtypes."""
    shared = (
        call.device == "cpu" and torch.get_num_threads() > 1 and torch.backends.mkl.is_available()
    )
    return _MKL_PANELS if shared and torch.float32 in dtypes else 0


def _tile(call: Call) -> int:
    """Return the bytes of a tile of logits."""
    route = call.route
    rows = tile_height(call.height, route.tile_rows, route.device)
    return rows * leading_dim(route.columns, route.logits, route.device) * route.logits.itemsize


def _logits(call: Call) -> int:
    """Return the bytes of a tile of logits and of what forms it."""
    return _tile(call) + call.head.cast + _library(call, call.route.logits, call.head.dtype)


def _slice(call: Call) -> int:
    """Return the bytes of a slice of logits that are formed again, and of its share of dweight."""
    head, route = call.head, call.route
    elements = route.tile_rows * route.columns
    rows, columns = tile_shape(call.tokens, route.columns, elements, route.block)
    tile = min(rows, call.tokens) * columns * route.logits.itemsize
    # a slice of dweight is summed apart, where its own dtype would round the sums
    narrow = call.tokens > rows and head.weight < head.size * WIDE
    apart = not head.frozen and (narrow or head.dtype == torch.float16)
    return tile + (columns * head.hidden * WIDE if apart else 0)


def _is_sparse(call: Call) -> bool:
    """Return whether the gradient of the weight is made from entries."""
    bounded = call.options.bounded
    return bounded is not None and not bounded.exact_weight


def _dhidden(call: Call) -> int:
    """Return the bytes of the gradient before the loss's own is multiplied in."""
    wide = call.sums_dhidden or call.head.dtype == torch.float16
    return call.wide_hidden if wide else call.hidden


def _sums(call: Call, single: bool = False, wide: bool = False) -> tuple[int, int]:
    """Return the bytes of both gradients as they are summed, and of those rounded at the end.

    ``single``: the weight's is of one GEMM, rounded once. ``wide``: all sums are fp32.
    """
    head = call.head
    narrow = single and head.dtype != torch.float16 and not head.cast
    dweight = head.dweight if narrow or head.frozen else head.size * WIDE
    pairs = ((call.wide_hidden if wide else _dhidden(call), call.hidden), (dweight, head.dweight))
    return sum(size for size, _ in pairs), sum(end for size, end in pairs if size != end)
