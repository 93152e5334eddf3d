"""The gradient of a head's weight: its destination, and its summation over tiles."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_kernels.engine.products import add_product
from grpo_kernels.engine.rows import narrowed, ranges
from grpo_kernels.head import SLICE_COLUMNS, accumulate, stats_dtype


@dataclass(frozen=True)
class WeightGrad:
    """The destination of the weight's gradient: a new tensor, or a caller's buffer."""

    # (V, D) fp32 or fp64 buffer that every GEMM adds to
    main_grad: Tensor | None = field(default=None, compare=False)
    # the new tensor is fp32 (fp64 for fp64), to be scaled by the loss's gradient before rounding
    is_wide: bool = False

    @property
    def until_scaled(self) -> WeightGrad:
        """The destination in a forward: only a backward adds to a caller's buffer."""
        return self if self.main_grad is None else WeightGrad(is_wide=True)


class WeightSum:
    """A sum of GEMMs over tiles: in the inputs' dtype, in fp32, or in a caller's buffer."""

    def __init__(
        self,
        *,
        weight: Tensor,  # (V, D)
        dtype: torch.dtype,  # of the hidden states
        num_rows: int,
        num_ranges: int,  # ranges of these rows, with one GEMM each
        grad: WeightGrad,
        sliced: bool = False,  # each slice of the vocabulary is rounded after its last range
    ) -> None:
        # one range: one GEMM, which accumulates internally and rounds once
        is_one_gemm = num_ranges <= 1 and dtype == weight.dtype != torch.float16
        is_one_gemm = is_one_gemm and not grad.is_wide and grad.main_grad is None
        self._dtype = dtype if is_one_gemm else stats_dtype(dtype)
        self._num_rows = num_rows
        self._main_grad = grad.main_grad
        self._slice: Tensor | None = None  # fp32 sum of a slice that is rounded afterwards
        if grad.main_grad is not None:
            self._sum = grad.main_grad
        else:
            make = torch.empty if num_ranges else torch.zeros
            stored = weight.dtype if sliced and not grad.is_wide else self._dtype
            self._sum = make(weight.shape, dtype=stored, device=weight.device)

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
            # by slices, to avoid a second tensor as large as the weight
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
