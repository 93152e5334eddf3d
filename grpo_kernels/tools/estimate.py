"""Peak memory of a loss at a head: formulas over the plan of the call. Nothing is run."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_kernels.backends import BACKENDS
from grpo_kernels.batch import TokenBatch
from grpo_kernels.engine import Needs, RunOptions, chunk_height, tile_height, tile_shape
from grpo_kernels.head import Head, leading_dim
from grpo_kernels.losses import LossConfig
from grpo_kernels.schedule import Plan, planned
from grpo_kernels.tools.machine import native_isas

FP16 = torch.float16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": FP16}
WIDE = 4  # bytes of an element in fp32
# What MKL keeps once several threads have shared an fp32 GEMM: measured, and about the same for
# all shapes of a head. cuBLAS has its workspace since its first call.
_MKL_PANELS = 30 << 20
# trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
_TRL_ROWS, _TRL_COLUMNS = 4096, 32768


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """An LM head under hidden states of ``dtype``; its weight may be fp32, as under autocast."""

    hidden: int  # D
    vocabulary: int  # V
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype | None = None  # None: the dtype of the hidden states
    frozen: bool = False  # the weight needs no gradient
    softcap: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES.values():
            known = ", ".join(map(str, DTYPES.values()))
            raise ValueError(f"dtype: expected one of {known}; got {self.dtype}")
        if self.weight_dtype not in (None, torch.float32, self.dtype):
            raise ValueError(
                f"weight_dtype: expected torch.float32 or that of the hidden states, "
                f"{self.dtype}; got {self.weight_dtype}"
            )

    @property
    def size(self) -> int:
        """Elements of the weight."""
        return self.vocabulary * self.hidden

    @property
    def weight(self) -> int:
        """Bytes of the weight."""
        return self.size * (self.weight_dtype or self.dtype).itemsize

    @property
    def dweight(self) -> int:
        """Bytes of its gradient."""
        return 0 if self.frozen else self.weight

    @property
    def cast(self) -> int:
        """Bytes of the weight's copy in the dtype of the hidden states, where that is another."""
        return self.size * self.dtype.itemsize if self.weight_dtype not in (None, self.dtype) else 0


@dataclass(frozen=True, kw_only=True)
class Call:
    """A loss of ``tokens`` valid tokens, all with a gradient."""

    name: str  # "eager" | "trl" | "one_pass" | "two_pass", the schedules of ours
    head: HeadShape
    tokens: int  # T
    device: str = "cuda"  # | "cpu"
    options: RunOptions = field(default_factory=RunOptions)  # of ours
    sums_dhidden: bool = False  # over the ranks that share the vocabulary; of ours

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states, and of their gradient."""
        return self.tokens * self.head.hidden * self.head.dtype.itemsize

    @property
    def inputs(self) -> int:
        """Bytes of hidden states and weight."""
        return self.hidden + self.head.weight

    @property
    def returned(self) -> int:
        """Bytes of their gradients."""
        return self.hidden + self.head.dweight

    @property
    def growth(self) -> int:
        """Bytes from the inputs alone to the peak of one forward and backward."""
        return max(self.returned, {"eager": _eager, "trl": _trl}.get(self.name, _ours)(self))

    @property
    def total(self) -> int:
        """Bytes at the peak, with the inputs."""
        return self.inputs + self.growth

    @property
    def plan(self) -> Plan:
        """The plan of ours. Its route is that of any number of tokens, what it saves is not."""
        one = _plan(self.head, self.device, replace(self.options, schedule=self.name))
        return replace(one, tokens=self.tokens)

    @property
    def keeps(self) -> str | None:
        """What the forward keeps for the backward; None where it is not to keep anything."""
        asked = self.name == "two_pass" or self.options.bounded is not None
        return self.plan.saving.kind if asked else None

    @property
    def gemms(self) -> int:
        """GEMMs over the vocabulary, forward and backward together."""
        if self.keeps is not None:
            return self.plan.saving.gemms
        return (4 if self.name == "trl" else 3) - self.head.frozen

    @property
    def default(self) -> str:
        """What ``schedule="auto"`` takes in place of :attr:`name`, for a loss of token scope."""
        return _plan(self.head, self.device, self.options, self.tokens).schedule


@functools.lru_cache
def _plan(head: HeadShape, device: str, options: RunOptions, tokens: int = 1) -> Plan:
    """Return the plan for tensors without memory, on a device that need not be here."""
    with FakeTensorMode():
        hidden = torch.empty(tokens, head.hidden, dtype=head.dtype, device=device)
        weight = torch.empty(head.vocabulary, head.hidden, dtype=head.dtype, device=device)
        target = torch.empty(tokens, dtype=torch.int64, device=device)
    counts = torch.tensor([[tokens], [tokens]])
    known: Any = {"counts": counts, "layout": counts[0], "max_target": counts.new_zeros(())}
    batch = TokenBatch(target=target, advantages=target, cu_seqlens=target, **known)
    options = replace(options, backend="chunked")  # all with tiles plan the same
    needs = Needs(hidden=True, weight=not head.frozen)
    return planned(hidden, Head(weight), batch, LossConfig(), options, needs=needs)[1]


def _library(device: str, *dtypes: torch.dtype) -> int:
    """Return the bytes that the library of a CPU keeps for GEMMs of these dtypes."""
    shared = device == "cpu" and torch.get_num_threads() > 1 and torch.backends.mkl.is_available()
    return _MKL_PANELS if shared and torch.float32 in dtypes else 0


def _copies(call: Call, elements: int) -> int:
    """Return the bytes of 16-bit factors that oneMKL copies for a product in fp32, without AMX."""
    narrow = call.device == "cpu" and call.head.dtype.itemsize < WIDE
    return WIDE * elements if narrow and "amx" not in native_isas()[:1] else 0


def _eager(call: Call) -> int:
    """Estimate full logits: ``F.linear``, ``log_softmax(dtype=float32)``, ``gather``, autograd."""
    head, width, elements = call.head, call.head.dtype.itemsize, call.tokens * call.head.vocabulary
    logits, wide = elements * width, elements * WIDE
    # only CUDA's fp16 kernel writes the gradient of its input in 16 bits
    dlogits = logits if head.dtype == FP16 and call.device != "cpu" else wide
    gradients = call.hidden + (0 if head.frozen else head.size * width)
    base = head.cast + _library(call.device, head.dtype)  # autocast keeps its copy to the end
    return base + max(
        # what a softcap saves, the log-softmax, its gradient (zeros but for the targets), dlogits
        head.softcap * logits + 2 * wide + dlogits,
        logits + gradients,
        gradients + (head.dweight if head.cast else 0),  # the weight's in two dtypes
    )


def _trl(call: Call) -> int:
    """Estimate the backward of ``ChunkedLogProbFunction``: tiles of logits, fp32 gradient sums."""
    head, width = call.head, call.head.dtype.itemsize
    rows, columns = min(call.tokens, _TRL_ROWS), min(head.vocabulary, _TRL_COLUMNS)
    several = call.tokens > rows or head.vocabulary > columns
    # of the weight, cast: the slice in use, and the one before it while this one is made
    slices = (1 + several) * columns * head.hidden * width if head.cast else 0
    # on a CPU in fp32: the scores, softmaxes and gradients of a tile, and a flag
    tile = rows * columns * (WIDE * (7 + head.softcap) + 1) if call.device == "cpu" else 0
    sums, rounded = _sums(call, wide=True)
    kept = sums + rows * _TRL_COLUMNS * width + slices
    return kept + _library(call.device, torch.float32) + max(rounded, tile)


def _sums(call: Call, single: bool = False, wide: bool = False) -> tuple[int, int]:
    """Return the bytes of both gradients as they are summed, and of those rounded at the end.

    ``single``: the weight's is of one GEMM, rounded once. ``wide``: all sums are fp32.
    """
    head, hidden, is_fp16 = call.head, call.hidden, call.head.dtype == FP16
    sums_wide = wide or is_fp16 or call.sums_dhidden
    dhidden = call.tokens * head.hidden * WIDE if sums_wide else hidden
    narrow = head.frozen or (single and not is_fp16 and not head.cast)
    dweight = head.dweight if narrow else head.size * WIDE
    pairs = ((dhidden, hidden), (dweight, head.dweight))
    return dhidden + dweight, sum(end for size, end in pairs if size != end)


def _ours(call: Call) -> int:
    """Estimate one pass, or two by what is kept between them."""
    head, tokens, route, bounded = call.head, call.tokens, call.plan.route, call.options.bounded
    saving, library = call.plan.saving, functools.partial(_library, call.device)
    kept, sparse = saving.nbytes, bounded is not None and not bounded.exact_weight
    wide = tokens * head.hidden * WIDE
    rounded_hidden = call.hidden if call.hidden != wide else 0
    dhidden = wide if call.sums_dhidden or head.dtype == FP16 else call.hidden
    # a tile of logits, and what forms it
    height = min(tokens, chunk_height(tokens, route.tile_rows, route.block))
    pitch = leading_dim(route.columns, route.logits, route.device) * route.logits.itemsize
    tile = tile_height(height, route.tile_rows, route.device) * pitch
    logits = tile + head.cast + library(route.logits, head.dtype)
    if call.name == "one_pass":
        # the weight's gradient is one GEMM where the logits are one tile, or entries
        single = tokens <= route.tile_rows or sparse
        sums, rounded = _sums(call, single)
        if not single and not head.frozen:
            logits += _copies(call, height * (head.vocabulary + head.hidden))
        if bounded is not None:  # the gradient beside them; entries of the chunks, joined
            logits += tile + 2 * kept
        return sums + max(logits, rounded)
    # logits formed again, a slice of the vocabulary at a time, and dweight: a slice of it is
    # summed apart where its own dtype would round the sums
    elements = route.tile_rows * route.columns
    rows, columns = tile_shape(tokens, route.columns, elements, route.block)
    again = head.cast + min(rows, tokens) * columns * route.logits.itemsize + head.dweight
    rounds = (tokens > rows and head.weight < head.size * WIDE) or head.dtype == FP16
    again += columns * head.hidden * WIDE if rounds and not head.frozen else 0
    again += _copies(call, (min(rows, tokens) + head.hidden) * columns)
    sums, rounded = _sums(call, single=True)
    # the forward has a tile only where no GEMM comes with its statistics
    no_tile = BACKENDS["cpu"].unavailable() is None if call.device == "cpu" else rounded_hidden
    sparse_head = kept + sums + max(head.cast, rounded)
    of_entries = sparse_head if sparse or head.frozen else dhidden + max(kept, again)
    found = 2 * (kept * height // tokens)  # entries of a chunk, as they are found
    base, *phases = {  # what is there all the time, and beside it in turn
        "nothing": (
            library(head.dtype),
            head.cast + (0 if no_tile else tile),
            again + wide,
            head.dweight + wide + rounded_hidden,
        ),
        # whose rows the backward multiplies
        "dhidden": (0, max(kept, dhidden) + logits, kept + wide + rounded_hidden),
        # the backward is the GEMMs of the gradients alone
        "dlogits": (
            kept,
            tile + head.cast + library(torch.float32),
            sums + head.cast + wide,
            sums + rounded,
        ),
        # which are there twice, as kept and as used
        "entries": (kept, logits + found, of_entries),
    }[saving.kind]
    return base + max(phases)
