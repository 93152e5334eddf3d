"""The gradients of a head's adapter, summed from tiles of the gradient of its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends import TileGradient
from grpo_kernels.engine.products import add_product, add_to_rows, weighted
from grpo_kernels.engine.rows import Gradients, Needs, Rows, Selection, narrowed, ranges
from grpo_kernels.head import HeadLoRA

_BLOCK_ROWS = 1024  # rows of hidden states that are upcast at a time


class LoRAGradients:
    """Gradients of a head's adapter and its share of dhidden, summed in fp32 tile by tile."""

    def __init__(self, lora: HeadLoRA, rows: Rows, needs: Needs) -> None:
        self._lora = lora = lora.wide(rows.hidden.dtype)
        self._hidden = rows.hidden
        self._shard = rows.head.shard
        self._of_a = needs.lora_a
        self.dinner: Tensor | None = None  # (T, r)
        self.db: Tensor | None = None  # (V, r)
        if needs.hidden or needs.lora_a:
            self._b = _narrow(lora.b, rows.hidden.dtype)
            self.dinner = lora.a.new_zeros(rows.count, lora.rank)
        if needs.lora_b:
            self.db = torch.zeros_like(lora.b)

    def add(
        self,
        gradient: TileGradient,
        hidden: Tensor,
        part: slice,
        *,
        selection: Selection,
        columns: slice,
    ) -> None:
        """Add a tile, with the arguments of :meth:`GradientSums.add`."""
        if self.dinner is not None:
            b, scale = self._b
            add_to_rows(
                narrowed(self.dinner, part),
                gradient,
                narrowed(b, columns),
                selection,
                first=columns.start == 0,
                scale=scale,
            )
        if self.db is not None:
            inner = weighted(self._lora.project_down(hidden), gradient.row_scale)
            inner, scale = _narrow(inner, hidden.dtype)
            place = narrowed(self.db, columns)
            add_product(place, gradient.dlogits.t(), inner, first=False, factor=scale)

    def complete(self, gradients: Gradients) -> Gradients:
        """Return the gradients with LoRA's share of dhidden, and with those of A and B."""
        lora = self._lora
        dhidden = gradients.hidden
        da = None
        if self.dinner is not None:
            if self._shard is not None:
                self._shard.start_sum(self.dinner).wait()
            if self._of_a:
                da = torch.zeros_like(lora.a)
            for rows in ranges(len(self._hidden), _BLOCK_ROWS):
                part = self.dinner[rows]
                hidden = self._hidden[rows]
                if da is not None:
                    torch.addmm(da, part.t(), hidden.to(da.dtype), alpha=lora.scaling, out=da)
                if dhidden is not None:
                    update = torch.mm(part, lora.a, out=part.new_empty(hidden.shape))
                    dhidden[rows] += update.mul_(lora.scaling)
        return gradients.joined(Gradients(lora_a=da, lora_b=self.db))


def _narrow(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return a factor in its GEMM's dtype, and a () power of two to multiply with (None: 1)."""
    if dtype != torch.float16 or not x.numel():
        return x.to(dtype), None
    largest = x.abs().amax().clamp(min=2.0**-100)
    # scaled to the middle of the range: fp16 cannot hold a factor of 1e-8
    scale = torch.exp2((largest.log2().ceil() - 10).clamp(max=100))
    return (x / scale).to(dtype), scale
