"""A buffer into which the gradient of the head's weight is added, product by product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.head.head import SLICE_COLUMNS, accumulate


@dataclass(frozen=True)
class WeightSink:
    """Where the weight's gradient goes, in place of a tensor of its own."""

    total: Tensor  # (V, D) fp32, or fp64 for fp64 hidden states
    factor: float = 1.0  # what the gradient is multiplied with

    def add(
        self,
        dlogits: Tensor,  # (C, n), the gradient of some columns of the logits
        rows: Tensor,  # (C, D)
        columns: slice = slice(None),  # which they are
        scale: Tensor | None = None,  # () contained in dlogits; it is divided out
    ) -> None:
        """Adds ``dlogits.T @ rows``; no second tensor of the size of the weight exists."""
        place = self.total[columns]
        if scale is None:
            accumulate(place, dlogits.t(), rows, first=False, alpha=self.factor)
            return
        for start in range(0, place.shape[0], SLICE_COLUMNS):
            part = slice(start, start + SLICE_COLUMNS)
            product = torch.empty_like(place[part])
            accumulate(product, dlogits[:, part].t(), rows, first=True)
            place[part].addcmul_(product, self.factor / scale)
