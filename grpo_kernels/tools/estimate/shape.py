"""What the formulas are about: a head, and the circumstances in which it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from grpo_kernels.backends.cpu import rows as cpu
from grpo_kernels.backends.registry import chunk_rows

WIDE = 4  # bytes of an element in fp32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """An LM head under hidden states of ``dtype``.

    ``weight_dtype`` differs from ``dtype`` under autocast: an fp32 weight that is multiplied in
    16 bits.
    """

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
        if self.dtype not in DTYPES:
            known = ", ".join(str(dtype) for dtype in DTYPES)
            raise ValueError(f"dtype: expected one of {known}; got {self.dtype}")
        if self.weight_dtype not in (None, torch.float32, self.dtype):
            raise ValueError(
                f"weight_dtype: expected {self.dtype} (of the hidden states) or torch.float32, "
                f"got {self.weight_dtype}"
            )

    @property
    def width(self) -> int:
        """Bytes of an element of the hidden states, and of a logit that is rounded to them."""
        return self.dtype.itemsize

    @property
    def weight_width(self) -> int:
        """Bytes of an element of the weight and of its returned gradient."""
        return (self.weight_dtype or self.dtype).itemsize

    @property
    def mixed(self) -> bool:
        """Whether the weight is multiplied in another dtype than its own."""
        return self.weight_width != self.width

    @property
    def size(self) -> int:
        """Elements of the weight."""
        return self.vocabulary * self.hidden

    @property
    def trained(self) -> int:
        """Elements of the weight's gradient."""
        return 0 if self.frozen else self.size

    def input_bytes(self, tokens: int) -> int:
        """The hidden states and the weight."""
        return tokens * self.hidden * self.width + self.size * self.weight_width

    def returned_bytes(self, tokens: int) -> int:
        """Their gradients."""
        return tokens * self.hidden * self.width + self.trained * self.weight_width


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how the head runs."""

    tokens: int  # T
    device: str  # "cpu" | "cuda"
    threads: int = 1  # of a CPU
    # of ours:
    max_workspace_bytes: int | None = None
    tile_rows: int | None = None  # where they are known already, and not to be derived
    num_chunks: int | None = None  # of one_pass, where they do not follow from the tile
    forward_only: int = 0  # further tokens, without a gradient
    sampling_mask: bool = False  # the loss is of sampling masks
    tiled: bool | None = None  # the forward without a gradient; None: where nothing else is there
    native: bool | None = None  # the C++ kernels of a CPU; None: where they can run

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens: expected a number > 0, got {self.tokens}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device: expected cpu or cuda; got {self.device!r}")

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def in_place(self) -> bool:
        """Whether row passes need no temporaries: they are native, or Triton's."""
        if not self.on_cpu:
            return True
        return cpu.unavailable() is None if self.native is None else self.native

    def rows(self, head: HeadShape, precision: str) -> int:
        """Of a tile of logits, at most."""
        if self.tile_rows is not None:
            return self.tile_rows
        device = torch.device(self.device)
        return chunk_rows(head.vocabulary, head.dtype, precision, device, self.max_workspace_bytes)

    def forms_no_tile(self, head: HeadShape) -> bool:
        """Whether the forward without a gradient is a product with its statistics folded in."""
        if self.tiled is not None:
            return not self.tiled
        return not self.sampling_mask and self.in_place and (self.on_cpu or head.width < WIDE)


class Moment(NamedTuple):
    """A candidate for the peak."""

    when: str
    bytes: int  # alive then, beyond the inputs: gradients, intermediates, copies


# MKL keeps panels of the operands once several threads have shared an fp32 product; measured, and
# about the same for all shapes of a head. One thread needs almost none, oneDNN's 16 bits neither.
_MKL_PANELS = 30 << 20


def library_bytes(setting: Setting, fp32_products: bool) -> int:
    """What the CPU's product library keeps. (cuBLAS has its workspace since its first call.)"""
    shared = setting.on_cpu and setting.threads > 1 and torch.backends.mkl.is_available()
    return _MKL_PANELS if shared and fp32_products else 0
