"""The parts of a call that belong to the LM head, and how its logits are formed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.backends.base import Transform, stats_dtype, with_clear_row_ends
from grpo_kernels.head import mkl
from grpo_kernels.head.lora import HeadLoRA

PRECISIONS = ("fp32", "input", "tf32")


@dataclass(frozen=True)
class Head:
    """A linear head: ``logits = hidden @ weight.T + bias``, an update by LoRA, then the transform.

    ``weight`` may be fp32 under 16-bit hidden states (autocast); it is then multiplied in the
    dtype of the hidden states and still gets an fp32 gradient.
    """

    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    transform: Transform
    lora: HeadLoRA | None = None

    @property
    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """A and B of the adapter."""
        return (None, None) if self.lora is None else (self.lora.a, self.lora.b)

    def rows(self, index: slice | Tensor) -> Head:
        """The same head for a subset of the rows."""
        return replace(self, transform=self.transform.rows(index))

    def columns(self, index: slice) -> Head:
        """The same head for a range of the vocabulary."""
        return Head(
            self.weight[index],
            self.bias[index] if self.bias is not None else None,
            self.transform,
            self.lora.columns(index) if self.lora is not None else None,
        )

    def to(self, dtype: torch.dtype) -> Head:
        """The same head, ready for products with hidden states of ``dtype``."""
        lora = self.lora.wide(dtype) if self.lora is not None else None
        return replace(self, weight=self.weight.to(dtype), lora=lora)


def logits_dtype(dtype: torch.dtype, precision: str) -> torch.dtype:
    """The dtype in which logits are kept: never rounded to 16 bits for ``precision="fp32"``."""
    return dtype if precision == "input" or dtype == torch.float64 else torch.float32


# Upcast copies of a 16-bit weight are made a slice of the vocabulary at a time.
SLICE_COLUMNS = 16384


def project(hidden: Tensor, head: Head, out: Tensor) -> Tensor:
    """The raw logits ``out`` (C, V) of ``hidden`` (C, D), accumulated in fp32 or better.

    ``out`` has the dtype of ``hidden``, or fp32 for 16-bit inputs: then the accumulator is stored
    as it is. ``head`` is that of :meth:`Head.to`.
    """
    if head.lora is None:
        _product(hidden, head.weight, out)
    elif out.dtype == stats_dtype(hidden.dtype):
        _product(hidden, head.weight, out)
        head.lora.add_to(out, hidden)
    else:
        _rounded_once(hidden, head.weight, head.lora, out)
    if head.bias is not None:
        out += head.bias
    return out


def _rounded_once(hidden: Tensor, weight: Tensor, lora: HeadLoRA, out: Tensor) -> None:
    """``out`` (C, V) of 16 bits from the fp32 sum of product and update."""
    for start in range(0, weight.shape[0], SLICE_COLUMNS):
        columns = slice(start, start + SLICE_COLUMNS)
        place = out[:, columns]
        exact = torch.empty_like(place, dtype=stats_dtype(hidden.dtype))
        _product(hidden, weight[columns], exact)
        lora.columns(columns).add_to(exact, hidden)
        place.copy_(exact)


def _product(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out = hidden @ weight.T``."""
    if out.dtype == hidden.dtype:
        torch.mm(with_clear_row_ends(hidden), weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
    elif mkl.available(hidden.dtype):
        mkl.matmul(hidden, weight.t(), out)
    else:
        upcast = hidden.float()
        for start in range(0, weight.shape[0], SLICE_COLUMNS):
            columns = slice(start, start + SLICE_COLUMNS)
            torch.mm(upcast, weight[columns].float().t(), out=out[:, columns])


def accumulate(
    out: Tensor,  # (M, N), fp32 or the dtype of the factors
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N)
    first: bool,
    alpha: float = 1.0,
) -> None:
    """``out += alpha a @ b``, or ``=`` for the ``first``; an fp32 sum is not rounded between."""
    beta = 0 if first else 1
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    elif a.is_cuda and first and alpha == 1:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=alpha, out=out)
    elif mkl.available(a.dtype):
        mkl.matmul(a, b, out, accumulate=not first, alpha=alpha)
    else:
        wide = b.float()
        for start in range(0, out.shape[0], SLICE_COLUMNS):
            rows = slice(start, start + SLICE_COLUMNS)
            place = out[rows]
            torch.addmm(place, a[rows].float(), wide, beta=beta, alpha=alpha, out=place)
