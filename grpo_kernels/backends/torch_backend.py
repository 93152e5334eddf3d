"""The passes in plain torch: any device, any floating dtype, fp64 included."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.base import (
    Backend,
    Entries,
    RowStats,
    StatsGrad,
    Tile,
    concatenate,
    output_view,
)
from grpo_kernels.backends.chunked import BLOCK_ELEMENTS, block_dlogits, block_stats, row_blocks
from grpo_kernels.backends.entries import extract_block, grouped_sums, listed

_ENTRIES_BLOCK = 1 << 20  # elements of a block: some twenty fp64 temporaries


class Chunked(Backend):
    """Rows block by block, in torch ops."""

    name = "chunked"

    def stats(self, tile: Tile, extras: bool) -> RowStats:
        blocks = row_blocks(tile.logits, BLOCK_ELEMENTS)
        return concatenate([block_stats(tile.rows(block), extras) for block in blocks])

    def dlogits_(
        self,
        tile: Tile,
        stats: RowStats,
        outer: StatsGrad,
        out_dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        out = output_view(tile.logits, out_dtype) if out is None else out
        for block in row_blocks(tile.logits, BLOCK_ELEMENTS):
            out[block] = block_dlogits(tile.rows(block), stats.rows(block), outer.rows(block))
        return out

    def extract_entries(
        self, tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int
    ) -> Entries:
        parts = [
            extract_block(tile.rows(block), stats.rows(block), keys[block], allowed[block], slots)
            for block in row_blocks(tile.logits, _ENTRIES_BLOCK)
        ]
        return Entries.joined(parts)

    def entries_matmul(self, entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor) -> None:
        rows, ids, values = listed(entries, factor)
        used, ids = ids.unique(return_inverse=True)
        product = grouped_sums(rows, len(factor), ids, values, matrix[used])
        kept = entries.used >= 0
        out[kept] = product[kept].to(out.dtype)

    def entries_transposed_matmul(
        self, entries: Entries, factor: Tensor, rows: Tensor, out: Tensor, add: bool
    ) -> None:
        places, ids, values = listed(entries, factor)
        order = ids.argsort(stable=True)
        used, ids = ids[order].unique_consecutive(return_inverse=True)
        product = grouped_sums(ids, len(used), places[order], values[order], rows)
        if not add:
            out.zero_()
        out[used] = (out[used] + product).to(out.dtype)
