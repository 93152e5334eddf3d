"""Gradients of LoRA on the LM head, from tiles of the gradient of its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.backends import Backend, Entries, TileGradient
from grpo_kernels.head import HeadLoRA, VocabShard, accumulate, zero_row_padding

_BLOCK_ROWS = 1024  # of hidden states that are widened at a time


class LoRAGradients:
    """Gradients of a head's adapter and its share of dhidden, summed in fp32 tile by tile.

    As the head's own weight and hidden states, the factors enter the large GEMMs in the dtype
    of the hidden states.
    """

    def __init__(
        self,
        lora: HeadLoRA,  # wide
        hidden: Tensor,  # (T, D)
        shard: VocabShard | None = None,  # whose ids B has; None: all
        *,
        of_hidden: bool,  # which gradients are wanted
        of_a: bool,
        of_b: bool,
    ) -> None:
        inner = of_hidden or of_a
        self._lora, self._hidden, self._of_a, self._shard = lora, hidden, of_a, shard
        self._factor = _Narrow.of(lora.b, hidden.dtype) if inner else None
        self._dinner = lora.a.new_zeros(hidden.shape[0], lora.rank) if inner else None
        self._db = torch.zeros_like(lora.b) if of_b else None

    def add(self, gradient: TileGradient, rows: slice | Tensor, columns: slice) -> None:
        """Add a tile's share; the gradient has the dtype of the hidden states."""
        dlogits, of_rows = gradient
        if self._dinner is not None and self._factor is not None:
            zero_row_padding(dlogits)
            place = self._dinner[rows]  # a copy for an index
            _add(place, dlogits, self._factor.rows(columns), of_rows)
            self._dinner[rows] = place
        if self._db is not None:
            inner = gradient.weighted(self._lora.inner(self._hidden[rows]))
            _add(self._db[columns], dlogits.t(), _Narrow.of(inner, dlogits.dtype))

    def add_entries(self, backend: Backend, entries: Entries, dlogp: Tensor) -> None:
        """Add the share of all rows that have entries."""
        if self._dinner is not None:
            backend.entries_matmul(entries, dlogp, self._lora.b, self._dinner)
        if self._db is not None:
            inner = self._lora.inner(self._hidden)
            backend.entries_transposed_matmul(entries, dlogp, inner, self._db, True)

    def times_(self, factor: Tensor) -> None:
        """Multiply what is summed so far by a () tensor."""
        for total in (self._dinner, self._db):
            if total is not None:
                total.mul_(factor)

    def finish(self, dhidden: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Add to ``dhidden`` (T, D), and return the gradients of A and B that are wanted."""
        lora, da = self._lora, None
        if self._dinner is None:
            return None, self._db
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
        return da, self._db


def _add(out: Tensor, a: Tensor, b: _Narrow, of_rows: Tensor | None = None) -> None:
    """Compute ``out += a @ b``, where each row has a factor; None: 1."""
    factor = b.scale
    if of_rows is not None:
        factor = of_rows[:, None] if factor is None else of_rows[:, None] * factor
    if factor is None:
        accumulate(out, a, b.values, first=False)
        return
    product = torch.empty_like(out)
    accumulate(product, a, b.values, first=True)
    out.addcmul_(product, factor)


@dataclass(frozen=True)
class _Narrow:
    """A factor in the dtype that its GEMM is computed in: ``values * scale``."""

    values: Tensor
    scale: Tensor | None  # () power of two; None: 1

    @staticmethod
    def of(x: Tensor, dtype: torch.dtype) -> _Narrow:
        """Scale fp16 values into the middle of the range: fp16 holds no factor of 1e-8."""
        if dtype != torch.float16 or not x.numel():
            return _Narrow(x.to(dtype), None)
        largest = x.abs().amax().clamp(min=2.0**-100)
        scale = torch.exp2((largest.log2().ceil() - 10).clamp(max=100))
        return _Narrow((x / scale).to(dtype), scale)

    def rows(self, index: slice) -> _Narrow:
        return _Narrow(self.values[index], self.scale)
