"""What an estimate is of: a head, and a call of a loss on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from grpo_kernels.backends import BACKENDS, chunk_rows
from grpo_kernels.engine import (
    Bounded,
    Keeping,
    Needs,
    Route,
    RunOptions,
    chunk_height,
    row_block,
    tile_height,
)
from grpo_kernels.head import logits_dtype, row_pitch
from grpo_kernels.schedule import summing_rows

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDE = 4  # bytes of an element in fp32
# What MKL keeps once several threads have shared an fp32 GEMM: measured, and about the same for
# all shapes of a head. cuBLAS has its workspace since its first call.
_MKL_PANELS = 30 << 20


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


@dataclass(frozen=True, kw_only=True)
class Call:
    """A loss of ``tokens`` valid tokens, all with a gradient."""

    head: HeadShape
    tokens: int  # T
    device: str  # "cpu" | "cuda"
    precision: str = "fp32"  # of ours
    max_workspace_bytes: int | None = None  # of ours
    activation_bytes: int | None = None  # of ours
    bounded: Bounded | None = None  # of ours
    sums_dhidden: bool = False  # over the ranks that share the vocabulary; of ours
    sums_dweight: bool = False  # over chunks; of ours

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
        head, size = self.head, self.max_workspace_bytes
        rows = chunk_rows(head.vocabulary, head.dtype, self.precision, self.where, size)
        if size is not None or not self.sums_dweight:
            return rows
        return summing_rows(self.device, rows, head.hidden, head.dtype, self.logits)

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

    @property
    def needs(self) -> Needs:
        return Needs(hidden=True, weight=not self.head.frozen)

    @cached_property
    def keeping(self) -> Keeping:
        """What the forward of our two passes keeps; with a bounded backward that of one, too."""
        options = RunOptions(
            precision=self.precision,
            backward=self.bounded or "exact",
            activation_bytes=self.activation_bytes,
        )
        route = Route(
            backend=BACKENDS["chunked"],  # they keep the same
            options=options,
            dtype=self.head.dtype,
            device=self.where,
            columns=self.head.vocabulary,
            tile_rows=self.fit,
            has_tile=True,
        )
        return Keeping.of(self.tokens, self.head.hidden, route, self.needs)

    @property
    def sparse_weight(self) -> bool:
        """Whether the gradient of the weight is made from entries."""
        return self.bounded is not None and not self.bounded.exact_weight

    @property
    def dhidden(self) -> int:
        """Bytes of the gradient of the hidden states before the loss's own is multiplied in."""
        wide = self.sums_dhidden or self.head.dtype == torch.float16
        return self.tokens * self.head.hidden * (WIDE if wide else self.head.width)

    def dweight(self, single: bool) -> int:
        """Return the bytes of that of the weight; ``single``: of one GEMM, rounded once."""
        narrow = single and self.head.dtype != torch.float16 and not self.head.cast
        return self.head.trained * (self.head.width if narrow else WIDE)

    @property
    def returned(self) -> tuple[int, int]:
        """Bytes of the gradients of hidden states and weight, as they are returned."""
        head = self.head
        return self.tokens * head.hidden * head.width, head.trained * head.weight_width

    def library(self, fp32_gemms: bool) -> int:
        """Return the bytes that the GEMM library of a CPU keeps."""
        shared = self.on_cpu and torch.get_num_threads() > 1 and torch.backends.mkl.is_available()
        return _MKL_PANELS if shared and fp32_gemms else 0
