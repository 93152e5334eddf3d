"""Gradients of LoRA on the LM head, from tiles of the gradient of its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import Backend, Entries, TileGradient
from grpo_kernels.engine.needs import Gradients, Needs, add_product, add_to_rows
from grpo_kernels.engine.rows import Rows, narrowed

_BLOCK_ROWS = 1024  # of hidden states that are widened at a time


class LoRAGradients:
    """Gradients of a head's adapter and its share of dhidden, summed in fp32 tile by tile.

    As the head's own weight and hidden states, the factors enter the large GEMMs in the dtype
    of the hidden states.
    """

    def __init__(self, rows: Rows, needs: Needs) -> None:
        lora: Any = rows.head.lora and rows.head.lora.wide(rows.hidden.dtype)
        self._lora, self._hidden, self._shard = lora, rows.hidden, rows.head.shard
        self._of_a, self._dinner, self._db = needs.lora_a, None, None
        if lora is not None and (needs.hidden or needs.lora_a):
            self._b = _narrow(lora.b, rows.hidden.dtype)
            self._dinner = lora.a.new_zeros(rows.count, lora.rank)
        if lora is not None and needs.lora_b:
            self._db = torch.zeros_like(lora.b)

    @property
    def sums(self) -> tuple[Tensor | None, Tensor | None]:
        """What is summed tile by tile."""
        return self._dinner, self._db

    def add(self, gradient: TileGradient, rows: Rows, columns: slice) -> None:
        """Add a tile's share; the gradient has the dtype of the hidden states."""
        if self._dinner is not None:
            b, scale = self._b
            place, b = narrowed(self._dinner, rows.part), narrowed(b, columns)
            add_to_rows(place, gradient, rows, b, columns.start == 0, scale)
        if self._db is not None:
            inner = gradient.weighted(self._lora.inner(rows.hidden))
            inner, scale = _narrow(inner, rows.hidden.dtype)
            add_product(narrowed(self._db, columns), gradient.dlogits.t(), inner, False, scale)

    def add_entries(self, backend: Backend, entries: Entries, dlogp: Tensor) -> None:
        """Add the share of all rows that have entries."""
        if self._dinner is not None:
            backend.entries_matmul(entries, dlogp, self._lora.b, self._dinner)
        if self._db is not None:
            inner = self._lora.inner(self._hidden)
            backend.entries_transposed_matmul(entries, dlogp, inner, self._db, True)

    def complete(self, found: Gradients) -> Gradients:
        """Add to ``found.hidden``, and return what is found with the gradients of A and B."""
        lora, dhidden, da = self._lora, found.hidden, None
        if self._dinner is not None:
            if self._shard is not None:
                self._shard.start_sum(self._dinner).wait()
            if self._of_a:
                da = torch.zeros_like(lora.a)
            for start in range(0, self._hidden.shape[0], _BLOCK_ROWS):
                rows = slice(start, start + _BLOCK_ROWS)
                part, hidden = self._dinner[rows], self._hidden[rows]
                if da is not None:
                    torch.addmm(da, part.t(), hidden.to(da.dtype), alpha=lora.scaling, out=da)
                if dhidden is not None:
                    update = torch.mm(part, lora.a, out=part.new_empty(hidden.shape))
                    dhidden[rows] += update.mul_(lora.scaling)
        return found.joined(Gradients(lora_a=da, lora_b=self._db))


def _narrow(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return a GEMM's factor in its dtype, and a () power of two that is divided out; None: 1.

    fp16 values are scaled into the middle of the range: fp16 holds no factor of 1e-8.
    """
    if dtype != torch.float16 or not x.numel():
        return x.to(dtype), None
    largest = x.abs().amax().clamp(min=2.0**-100)
    scale = torch.exp2((largest.log2().ceil() - 10).clamp(max=100))
    return (x / scale).to(dtype), scale
