"""Which gradients of a head's inputs are wanted, where they are summed, and what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends import TileGradient
from grpo_kernels.engine.rows import Rows
from grpo_kernels.head import accumulate, stats_dtype, zero_row_padding


def add_product(
    out: Tensor,  # (M, N)
    a: Tensor,  # (M, K), of the dtype of b
    b: Tensor,  # (K, N)
    first: bool,
    factor: Tensor | None = None,  # () or (M, 1), fp32 or fp64; None: 1
) -> None:
    """Compute ``out += factor * (a @ b)``, or ``=`` for the ``first``, with one rounding."""
    if factor is None:
        accumulate(out, a, b, first)
        return
    product = torch.empty_like(out, dtype=factor.dtype)
    accumulate(product, a, b, first=True)
    if first:
        torch.mul(product, factor, out=out)
    else:
        out.addcmul_(product, factor)


def add_to_rows(
    whole: Tensor,  # (all, N), of the range that the rows are of
    gradient: TileGradient,  # (C, n)
    rows: Rows,
    matrix: Tensor,  # (n, N)
    first: bool,
    scale: Tensor | None = None,  # () of the matrix; None: 1
) -> None:
    """Add ``gradient @ matrix``, or set it for the ``first``; rows that were dropped have none."""
    dlogits, factor = gradient
    zero_row_padding(dlogits)
    if factor is not None:
        scale = factor[:, None] if scale is None else factor[:, None] * scale
    if rows.index is None:
        add_product(whole, dlogits, matrix, first, scale)
    else:  # of all columns
        place = whole.new_empty(rows.count, whole.shape[1])
        add_product(place, dlogits, matrix, True, scale)
        whole.zero_().index_copy_(0, rows.index, place)


@dataclass(frozen=True)
class MainGrad:
    """A buffer that the weight's gradient is added to, GEMM by GEMM, in place of a new tensor."""

    total: Tensor  # (V, D) fp32, or fp64 for fp64 hidden states


@dataclass(frozen=True)
class Needs:
    """Which gradients are wanted."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    lora_a: bool = False
    lora_b: bool = False
    main_grad: MainGrad | None = None  # where that of the weight is added; None: a new tensor
    wide: bool = False  # that of the weight in fp32, to be scaled before it is rounded

    @staticmethod
    def of(inputs: Sequence[Tensor | None]) -> Needs:
        """Return those of a head's inputs that autograd tracks."""
        enabled = torch.is_grad_enabled()
        wanted = [enabled and x is not None and x.requires_grad for x in inputs]
        return Needs(*wanted)  # type: ignore[arg-type]

    @property
    def of_inputs(self) -> list[bool]:
        """Which of a head's inputs get a gradient, in their order."""
        return [self.hidden, self.weight, self.bias, self.lora_a, self.lora_b]

    @property
    def any(self) -> bool:
        return any(self.of_inputs)

    @property
    def of_head(self) -> bool:
        """Whether a gradient with an entry per id of the vocabulary is wanted."""
        return self.weight or self.bias or self.lora_b

    @property
    def of_rows(self) -> Needs:
        """The others of these."""
        return replace(self, weight=False, bias=False, lora_b=False, main_grad=None)

    @property
    def of_head_alone(self) -> Needs:
        """Those that :attr:`of_rows` leaves out."""
        return replace(self, hidden=False, lora_a=False)


class Gradients(NamedTuple):
    """Gradients of the head's inputs; fp32, or the input dtype where nothing is lost by it."""

    hidden: Tensor | None = None  # (T, D)
    weight: Tensor | None = None  # (V, D)
    bias: Tensor | None = None  # (V,)
    lora_a: Tensor | None = None  # (r, D)
    lora_b: Tensor | None = None  # (V, r)

    def joined(self, others: Gradients) -> Gradients:
        """Return the sums of these and the others, where there are any."""
        pairs = zip(self, others, strict=True)
        return Gradients(*(y if x is None else x if y is None else x + y for x, y in pairs))


def new_gradients(
    rows: Rows, needs: Needs, num_ranges: int, sliced: bool = False
) -> tuple[Gradients, torch.dtype]:
    """Return uninitialised gradients, or zeros where no range of rows will be written.

    Also return the dtype in which that of the weight is summed. ``sliced``: a slice of it is
    rounded as soon as it is there, and that of the hidden states is a sum over slices.
    ``rows`` are those of all ranges, before their head is made ready for GEMMs.
    """
    hidden, weight = rows.hidden, rows.head.weight
    dtype, wide = hidden.dtype, stats_dtype(hidden.dtype)
    make = torch.empty if num_ranges else torch.zeros
    exact = dtype != torch.float16  # fp16 results wait in fp32 for the loss scale
    # one range: one GEMM, accumulated inside of it and rounded once
    one_gemm = num_ranges <= 1 and exact and weight.dtype == dtype and not needs.wide
    summed, dhidden, dweight, dbias = dtype if one_gemm else wide, None, None, None
    if needs.hidden:
        is_final = exact and not sliced and rows.head.shard is None  # the ranks' are summed
        dhidden = make(hidden.shape, dtype=dtype if is_final else wide, device=hidden.device)
    if needs.weight and needs.main_grad is None:
        of_slices = weight.dtype if sliced and not needs.wide else summed
        dweight = make(weight.shape, dtype=of_slices, device=hidden.device)
    if needs.bias:
        dbias = torch.zeros(weight.shape[0], dtype=wide, device=hidden.device)
    return Gradients(dhidden, dweight, dbias), summed
