"""Peak memory of a head's loss, forward and backward: eager, TRL's chunked head and ours."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grpo_kernels.backends import BACKENDS, chunk_rows
from grpo_kernels.engine import chunk_height, row_block, tile_height, tile_shape
from grpo_kernels.head import logits_dtype, row_pitch
from grpo_kernels.schedule import adding_costs_more

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WIDE = 4  # bytes of an element in fp32
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
        for name in ("hidden", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a number > 0, got {getattr(self, name)}")
        if self.dtype not in DTYPES.values():
            known = ", ".join(map(str, DTYPES.values()))
            raise ValueError(f"dtype: expected one of {known}; got {self.dtype}")
        if self.weight_dtype not in (None, torch.float32, self.dtype):
            raise ValueError(
                f"weight_dtype: expected torch.float32 or that of the hidden states, "
                f"{self.dtype}; got {self.weight_dtype}"
            )

    @property
    def width(self) -> int:
        """Bytes of an element of the hidden states."""
        return self.dtype.itemsize

    @property
    def weight_width(self) -> int:
        """Bytes of an element of the weight and of its gradient."""
        return (self.weight_dtype or self.dtype).itemsize

    @property
    def size(self) -> int:
        """Elements of the weight."""
        return self.vocabulary * self.hidden

    @property
    def trained(self) -> int:
        """Elements of the weight's gradient."""
        return 0 if self.frozen else self.size

    @property
    def cast(self) -> int:
        """Bytes of the weight's copy in the dtype of the hidden states, where that is another."""
        return self.size * self.width if self.weight_width != self.width else 0


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of one forward and backward."""

    inputs: int  # hidden states and weight
    returned: int  # their gradients
    extra: int  # what else is alive at the peak

    @property
    def growth(self) -> int:
        """Bytes from the inputs alone to the peak."""
        return self.returned + self.extra

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.inputs + self.growth


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A loss of ``tokens`` valid tokens, all with a gradient."""

    head: HeadShape
    tokens: int  # T
    device: str  # "cpu" | "cuda"
    precision: str = "fp32"  # of ours
    max_workspace_bytes: int | None = None  # of ours
    memory: int | None = None  # bytes of the GPU; None: the present one's

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens: expected a number > 0, got {self.tokens}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device: expected cpu or cuda; got {self.device!r}")

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def logits(self) -> torch.dtype:
        """The dtype of our logits."""
        return logits_dtype(self.head.dtype, self.precision)

    @property
    def fit(self) -> int:
        """Rows that fit into a logits tile of ours."""
        shape = (self.head.vocabulary, self.head.dtype, self.precision)
        return chunk_rows(*shape, self.where, self.max_workspace_bytes, self.memory)

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)

    @property
    def height(self) -> int:
        """Rows of a chunk of ours."""
        return min(self.tokens, chunk_height(self.tokens, self.fit, row_block(self.where)))

    @property
    def tile(self) -> int:
        """Bytes of a logits tile of ours."""
        pitch = row_pitch(self.head.vocabulary, self.logits, self.where)
        return tile_height(self.height, self.fit, self.where) * pitch * self.logits.itemsize

    def library(self, fp32_gemms: bool) -> int:
        """Return the bytes that the GEMM library of a CPU keeps."""
        shared = self.on_cpu and torch.get_num_threads() > 1 and torch.backends.mkl.is_available()
        return _MKL_PANELS if shared and fp32_gemms else 0


def _eager(call: _Call) -> int:
    """Estimate full logits: ``F.linear``, ``log_softmax(dtype=float32)``, ``gather``, autograd."""
    head, elements = call.head, call.tokens * call.head.vocabulary
    logits, wide = elements * head.width, elements * _WIDE
    base = head.cast + call.library(head.width == _WIDE)  # autocast keeps its copy to the end
    tanh = logits if head.softcap else 0  # saved for the backward
    # only CUDA's fp16 kernel writes the gradient of its input in 16 bits
    converts = head.dtype == torch.float16 and not call.on_cpu
    gradients = (call.tokens * head.hidden + head.trained) * head.width
    return base + max(
        # the log-softmax, its gradient (zeros but for the targets), the gradient of its input
        tanh + 2 * wide + (logits if converts else wide),
        logits + gradients,
        gradients + (head.trained * _WIDE if head.cast else 0),  # the weight's in two dtypes
    )


def _trl(call: _Call) -> int:
    """Estimate the backward of ``ChunkedLogProbFunction``: tiles of logits, fp32 gradient sums."""
    head, hidden = call.head, call.tokens * call.head.hidden
    rows, columns = min(call.tokens, _TRL_ROWS), min(head.vocabulary, _TRL_COLUMNS)
    several = call.tokens > rows or head.vocabulary > columns
    # of the weight, cast: the slice in use, and the one before it while this one is made
    slices = (1 + several) * columns * head.hidden * head.width if head.cast else 0
    sums = (hidden + head.trained) * _WIDE
    base = sums + rows * _TRL_COLUMNS * head.width + slices + call.library(fp32_gemms=True)
    rounded = [(hidden, head.width), (head.trained, head.weight_width)]
    peak = sum(size * width for size, width in rounded if width < _WIDE)
    if call.on_cpu:
        tile = rows * columns * _WIDE
        # scaled and tempered scores, log p, p, the gradient, the indicator, minus p, and a flag;
        # with a softcap its tanh, too
        temporaries = tile * (7 + head.softcap) + rows * columns
        # fp32 copies of a 16-bit tile and of its other factor, a slice of the weight or the rows
        copies = tile + max(columns, rows) * head.hidden * _WIDE if head.width < _WIDE else 0
        peak = max(peak, temporaries, copies)
    return base + peak


def _one_pass(call: _Call) -> int:
    """Estimate gradients in the forward, chunk by chunk, which the backward scales."""
    head, fp16 = call.head, call.head.dtype == torch.float16
    single = call.tokens <= call.fit  # the weight's gradient is one GEMM, rounded once
    dhidden = call.tokens * head.hidden * (_WIDE if fp16 else head.width)
    dweight = head.trained * (head.width if single and not fp16 and not head.cast else _WIDE)
    tile = call.tile + head.cast
    tile += call.library(fp32_gemms=_WIDE in (call.logits.itemsize, head.width))
    returned = [(dhidden, _dhidden(call)), (dweight, _dweight(call))]
    rounded = sum(result for gradient, result in returned if gradient != result)
    return dhidden + dweight + max(tile, rounded)


def _two_pass(call: _Call) -> int:
    """Estimate statistics first, and a backward that forms the logits slice by slice."""
    head = call.head
    elements = call.fit * head.vocabulary
    rows, columns = tile_shape(call.tokens, head.vocabulary, elements, row_block(call.where))
    tile = min(rows, call.tokens) * columns * call.logits.itemsize
    wide, dweight = call.tokens * head.hidden * _WIDE, _dweight(call)
    # a slice of dweight is summed apart, where its own dtype would round the sums
    narrow = call.tokens > rows and head.weight_width < _WIDE
    apart = head.trained and (narrow or head.dtype == torch.float16)
    waiting = columns * head.hidden * _WIDE if apart else 0
    rounded = _dhidden(call) if head.width < _WIDE else 0
    # the forward has a tile only where no GEMM comes with its statistics
    tiled = BACKENDS["cpu"].unavailable() if call.on_cpu else head.width == _WIDE
    forward = call.tile if tiled else 0
    return call.library(fp32_gemms=head.width == _WIDE) + max(
        head.cast + forward,
        head.cast + tile + wide + dweight + waiting,
        wide + rounded + dweight,
    )


def _dhidden(call: _Call) -> int:
    """Return the bytes of the gradient of the hidden states, as it is returned."""
    return call.tokens * call.head.hidden * call.head.width


def _dweight(call: _Call) -> int:
    """Return the bytes of the gradient of the weight, as it is returned."""
    return call.head.trained * call.head.weight_width


_PEAKS = {"eager": _eager, "trl": _trl, "one_pass": _one_pass, "two_pass": _two_pass}


def estimate_memory(
    name: str,
    head: HeadShape,
    tokens: int,
    *,
    device: str = "cuda",
    precision: str = "fp32",
    max_workspace_bytes: int | None = None,
    memory: int | None = None,
) -> MemoryEstimate:
    """Estimate the peak memory of a loss of ``tokens`` valid tokens, all with a gradient.

    Vectors of one value per token are left out, and on a GPU the workspaces of libraries.

    Args:
        name: "eager", "trl", or a schedule of ours: "one_pass" or "two_pass".
        head: the shape.
        tokens: T.
        device: "cpu" (resident memory) or "cuda" (the caching allocator's).
        precision: as in ``linear_policy_loss``; of ours only.
        max_workspace_bytes: likewise.
        memory: bytes of the GPU, which the default tile follows; None: of the present one.

    Raises:
        ValueError: a number or name is out of range; the message names the argument.
    """
    if name not in _PEAKS:
        raise ValueError(f"name: expected one of {', '.join(_PEAKS)}; got {name!r}")
    call = _Call(
        head=head,
        tokens=tokens,
        device=device,
        precision=precision,
        max_workspace_bytes=max_workspace_bytes,
        memory=memory,
    )
    inputs = tokens * head.hidden * head.width + head.size * head.weight_width
    returned = _dhidden(call) + _dweight(call)
    return MemoryEstimate(inputs, returned, max(0, _PEAKS[name](call) - returned))


def default_schedule(
    head: HeadShape,
    tokens: int,
    *,
    device: str = "cuda",
    precision: str = "fp32",
    memory: int | None = None,
) -> str:
    """Return what ``schedule="auto"`` takes for a loss of token scope."""
    call = _Call(head=head, tokens=tokens, device=device, precision=precision, memory=memory)
    num_chunks = -(-tokens // call.height)
    costly = not head.frozen and adding_costs_more(device, head.dtype, tokens, num_chunks)
    return "two_pass" if costly else "one_pass"
