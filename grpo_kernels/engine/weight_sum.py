"""The gradient of a head's weight: where it goes, and how it is summed from tiles."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_kernels.engine.rows import Rows, narrowed, ranges
from grpo_kernels.head import SLICE_COLUMNS, accumulate, stats_dtype

_PRODUCT_ROWS = 2048  # of a product in fp32 that is rounded: a whole wave of a GPU's tiles


@dataclass(frozen=True)
class WeightGrad:
    """Where the gradient of the weight goes: a new tensor, or a caller's buffer."""

    # (V, D) fp32 or fp64, to which every GEMM adds
    main_grad: Tensor | None = field(default=None, compare=False)
    # the new tensor is fp32 (fp64 for fp64), to be multiplied by that of the loss before rounding
    is_wide: bool = False

    @property
    def until_scaled(self) -> WeightGrad:
        """Where a forward puts it: only a backward adds to a caller's buffer."""
        return self if self.main_grad is None else WeightGrad(is_wide=True)


class WeightSum:
    """A sum of GEMMs over tiles: in the inputs' dtype, in fp32, or in a caller's buffer."""

    def __init__(
        self,
        rows: Rows,
        num_ranges: int,
        grad: WeightGrad,
        *,
        sliced: bool = False,
    ) -> None:
        """``sliced``: each slice of the vocabulary is rounded once its last range is added."""
        weight = rows.head.weight
        dtype = rows.hidden.dtype
        # one range: one GEMM, accumulated inside of it and rounded once
        is_one_gemm = num_ranges <= 1 and dtype == weight.dtype != torch.float16
        is_one_gemm = is_one_gemm and not grad.is_wide and grad.main_grad is None
        self._dtype = dtype if is_one_gemm else stats_dtype(dtype)
        self._num_rows = rows.count
        self._main_grad = grad.main_grad
        self._slice: Tensor | None = None  # in fp32, of a sum that is rounded afterwards
        if grad.main_grad is not None:
            self._sum = grad.main_grad
        else:
            make = torch.empty if num_ranges else torch.zeros
            stored = weight.dtype if sliced and not grad.is_wide else self._dtype
            self._sum = make(weight.shape, dtype=stored, device=rows.hidden.device)

    @property
    def result(self) -> Tensor | None:
        """The (V, D) gradient; None if it is in the caller's buffer."""
        return self._sum if self._main_grad is None else None

    def add(
        self,
        dlogits: Tensor,  # (C, v)
        hidden: Tensor,  # (C, D)
        columns: slice,  # of the vocabulary
        part: slice,  # the range of the call's rows
        scale: Tensor | None = None,  # () contained in all sums; None: 1
    ) -> None:
        """Add ``dlogits^T @ hidden``."""
        place = narrowed(self._sum, columns)
        dlogits_t = dlogits.t()
        if self._main_grad is not None and scale is not None:
            # without a second tensor as large as the weight
            for ids in ranges(len(place), SLICE_COLUMNS):
                add_product(place[ids], dlogits_t[ids], hidden, first=False, factor=1 / scale)
            return
        total = place
        if place.dtype != self._dtype:
            if self._slice is None:
                self._slice = torch.empty_like(place, dtype=self._dtype)
            total = self._slice
        is_first = part.start == 0 and self._main_grad is None
        accumulate(total, dlogits_t, hidden, is_first)
        if self._slice is not None and part.stop == self._num_rows:
            place.copy_(total if scale is None else total.div_(scale))
            self._slice = None


def add_product(
    out: Tensor,  # (M, N)
    a: Tensor,  # (M, K), of the dtype of b
    b: Tensor,  # (K, N)
    *,
    first: bool,
    factor: Tensor | None = None,  # () or (M, 1), fp32 or fp64; None: 1
) -> None:
    """Compute ``out += factor * (a @ b)``, or ``=`` for the ``first``, with one rounding."""
    if factor is None:
        accumulate(out, a, b, first)
        return
    for rows in ranges(len(out), _PRODUCT_ROWS):
        product = torch.empty_like(out[rows], dtype=factor.dtype)
        accumulate(product, a[rows], b, first=True)
        of_rows = factor[rows] if factor.dim() else factor
        if first:
            torch.mul(product, of_rows, out=out[rows])
        else:
            out[rows].addcmul_(product, of_rows)
