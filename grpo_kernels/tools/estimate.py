"""Peak memory of a loss at a head: formulas over the plan of the call. Nothing is run."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_kernels.arguments import check_fields, choice
from grpo_kernels.backends import BACKENDS
from grpo_kernels.batch import TokenBatch
from grpo_kernels.engine import Needs, RunOptions, chunk_height, tile_height, tile_shape
from grpo_kernels.head import Head, leading_dim
from grpo_kernels.losses import LossConfig
from grpo_kernels.schedule import FORMED_ROWS, Plan, keeps_gradients, planned_rows
from grpo_kernels.tools.machine import native_isas

FP16 = torch.float16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": FP16}
WIDE = 4  # bytes of an element in fp32
# trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
_TRL_ROWS, _TRL_COLUMNS = 4096, 32768


@dataclass(frozen=True, kw_only=True)
class Call:
    """A loss of ``tokens`` valid tokens, all with a gradient, at an LM head.

    Sizes are in bytes: of the ``weight``, its gradient and its copy in the dtype of the hidden
    states (``cast``), of the hidden ``rows`` and of their gradient before the loss's own is
    multiplied in (``dhidden``); of all that is given, of all gradients, and at the peak.

    Raises:
        ValueError: a dtype is none of those that are known; the message names the argument.
    """

    name: str  # "eager" | "trl" | "one_pass" | "two_pass", the schedules of ours
    hidden: int  # D
    vocabulary: int  # V
    tokens: int  # T
    dtype: torch.dtype = choice(torch.bfloat16, DTYPES.values())  # of the hidden states
    weight_dtype: torch.dtype | None = None  # None: the same; or fp32, as under autocast
    frozen: bool = False  # the weight needs no gradient
    softcap: bool = False
    device: str = "cuda"  # | "cpu"
    options: RunOptions = field(default_factory=RunOptions)  # of ours
    sums_dhidden: bool = False  # over the ranks that share the vocabulary; of ours
    teacher: int = 0  # hidden size of one, from which the divergence is taken in one pass; 0: none

    def __post_init__(self) -> None:
        check_fields(self)
        if self.weight_dtype not in (None, torch.float32, self.dtype):
            raise ValueError(
                f"weight_dtype: expected torch.float32 or that of the hidden states, "
                f"{self.dtype}; got {self.weight_dtype}"
            )

    @property
    def elements(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def weight(self) -> int:
        return self.elements * (self.weight_dtype or self.dtype).itemsize

    @property
    def dweight(self) -> int:
        return 0 if self.frozen else self.weight

    @property
    def cast(self) -> int:
        same = self.weight_dtype in (None, self.dtype)
        return 0 if same else self.elements * self.dtype.itemsize

    @property
    def rows(self) -> int:
        return self.tokens * self.hidden * self.dtype.itemsize

    @property
    def wide_rows(self) -> int:
        return self.tokens * self.hidden * WIDE

    @property
    def dhidden(self) -> int:
        return self.wide_rows if self.sums_dhidden or self.dtype == FP16 else self.rows

    @property
    def inputs(self) -> int:
        of_teacher = self.teacher * (self.tokens + self.vocabulary) * self.dtype.itemsize
        return self.rows + self.weight + of_teacher

    @property
    def returned(self) -> int:
        return self.rows + self.dweight

    @property
    def growth(self) -> int:
        """Bytes from the inputs alone to the peak of one forward and backward."""
        return max(self.returned, {"eager": _eager, "trl": _trl}.get(self.name, _ours)(self))

    @property
    def total(self) -> int:
        return self.inputs + self.growth

    @property
    def plan(self) -> Plan:
        """The plan of ours. Its route is that of any number of tokens, what it saves is not."""
        return replace(_plan(replace(self, tokens=1)), tokens=self.tokens)

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
        return (4 if self.name == "trl" or self.teacher else 3) - self.frozen

    @property
    def flop(self) -> float:
        """Operations of these GEMMs."""
        depth = (self.gemms - bool(self.teacher)) * self.hidden + self.teacher
        return 2.0 * self.tokens * self.vocabulary * depth

    @property
    def default(self) -> str:
        """What ``schedule="auto"`` takes in place of :attr:`name`, for a loss of token scope."""
        return _plan(replace(self, name="auto")).schedule


@functools.lru_cache
def _plan(call: Call) -> Plan:
    """Return the plan for tensors without memory, on a device that need not be here."""
    tokens = call.tokens
    with FakeTensorMode():
        hidden = torch.empty(tokens, call.hidden, dtype=call.dtype, device=call.device)
        weight = torch.empty(call.vocabulary, call.hidden, dtype=call.dtype, device=call.device)
        target = torch.empty(tokens, dtype=torch.int64, device=call.device)
    counts = torch.tensor([[tokens], [tokens]])
    known: Any = {"counts": counts, "layout": counts[0], "max_target": counts.new_zeros(())}
    batch = TokenBatch(target=target, advantages=target, cu_seqlens=target, **known)
    # all with tiles plan the same
    options = replace(call.options, backend="chunked", schedule=call.name)
    needs = Needs(hidden=True, weight=not call.frozen)
    return planned_rows(hidden, Head(weight), batch, LossConfig(), options, needs)[1]


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
