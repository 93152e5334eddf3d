"""The parts of a call that belong to the LM head, and how its logits are formed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.logprob import mkl
from grpo_kernels.logprob.rows import Transform

PRECISIONS = ("fp32", "input", "tf32")


@dataclass(frozen=True)
class Head:
    """A linear head: ``logits = hidden @ weight.T + bias``, then the transform.

    ``weight`` may be fp32 under 16-bit hidden states (autocast); it is then multiplied in the
    dtype of the hidden states and still gets an fp32 gradient.
    """

    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    transform: Transform

    def rows(self, index: slice | Tensor) -> Head:
        """The same head for a subset of the rows."""
        return Head(self.weight, self.bias, self.transform.rows(index))


def logits_dtype(dtype: torch.dtype, precision: str) -> torch.dtype:
    """The dtype in which logits are kept: never rounded to 16 bits for ``precision="fp32"``."""
    return dtype if precision == "input" or dtype == torch.float64 else torch.float32


# Upcast copies of a 16-bit weight are made a slice of the vocabulary at a time.
SLICE_COLUMNS = 16384


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``out = hidden @ weight.T + bias`` for (C, D) and (V, D), accumulated in fp32 or better.

    ``out`` (C, V) has the dtype of ``hidden``, or fp32 for 16-bit inputs: then the accumulator is
    stored as it is.
    """
    if out.dtype == hidden.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
    elif mkl.available(hidden.dtype):
        mkl.matmul(hidden, weight.t(), out)
    else:
        upcast = hidden.float()
        for start in range(0, weight.shape[0], SLICE_COLUMNS):
            columns = slice(start, start + SLICE_COLUMNS)
            torch.mm(upcast, weight[columns].float().t(), out=out[:, columns])
    if bias is not None:
        out += bias
    return out


def accumulate(
    out: Tensor,  # (M, N), fp32 or the dtype of the factors
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N)
    first: bool,
) -> None:
    """``out += a @ b``, or ``=`` for the ``first`` product; an fp32 sum is not rounded between."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=0 if first else 1, out=out)
    elif a.is_cuda and first:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    elif mkl.available(a.dtype):
        mkl.matmul(a, b, out, accumulate=not first)
    else:
        wide = b.float()
        for start in range(0, out.shape[0], SLICE_COLUMNS):
            rows = slice(start, start + SLICE_COLUMNS)
            torch.addmm(out[rows], a[rows].float(), wide, beta=0 if first else 1, out=out[rows])
