"""Entries of a row's gradient that matter, in Triton."""

from __future__ import annotations

from torch import Tensor

from grpo_kernels.backends.base import RowStats, Tile
from grpo_kernels.backends.entries import Entries, EntryKernels
from grpo_kernels.backends.triton.extract import extract
from grpo_kernels.backends.triton.gather import entries_matmul, entries_transposed_matmul


class _TritonEntries:
    def extract(
        self, tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int
    ) -> Entries:
        return extract(tile, stats, keys, allowed, slots)

    def matmul(self, entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor) -> None:
        entries_matmul(entries, factor, matrix, out)

    def transposed_matmul(
        self, entries: Entries, factor: Tensor, rows: Tensor, out: Tensor, add: bool
    ) -> None:
        entries_transposed_matmul(entries, factor, rows, out, add)


TRITON_ENTRIES: EntryKernels = _TritonEntries()
