"""The native passes over entries: their choice from a tile of logits, and products with them."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.base import RowStats, Tile
from grpo_kernels.backends.cpu.abi import EntriesView, Extraction, Product
from grpo_kernels.backends.cpu.rows import (
    DTYPES,
    library,
    pointer,
    row_vector,
    tile_view,
    unit_stride,
)
from grpo_kernels.backends.entries import TORCH_ENTRIES, Entries


class NativeEntries:
    """``EntryKernels`` for fp32, bf16 and fp16 on a CPU; what else there is, plain torch does.

    Results depend neither on ``torch.get_num_threads()`` nor, row by row, on the other rows.
    """

    def __init__(self, isa_rank: int = 0) -> None:
        self._isa_rank = isa_rank  # index into ``cpu.isas()``

    def extract(
        self, tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int
    ) -> Entries:
        if tile.logits.dtype not in DTYPES:
            return TORCH_ENTRIES.extract(tile, stats, keys, allowed, slots)
        assert slots > 0, slots
        rows, columns = tile.logits.shape
        entries = Entries(
            ids=torch.zeros(rows, slots, dtype=torch.int32),
            values=torch.zeros(rows, slots),
            used=torch.empty(rows, dtype=torch.int32),
            error=torch.empty(rows),
            error_l1=torch.empty(rows),
            norm=torch.empty(rows),
        )
        view = tile_view(tile.logits, rows, columns, tile.target, tile.transform)
        inputs = [
            row_vector(stats.logp, rows),
            row_vector(stats.lse, rows, torch.float64),
            row_vector(keys, rows, torch.int32),
            row_vector(allowed.double(), rows, torch.float64),
        ]
        extraction = Extraction(*map(pointer, inputs), _view(entries), *map(pointer, entries[3:]))
        library().grpo_extract(view, extraction, self._isa_rank, torch.get_num_threads())
        return entries

    def matmul(self, entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor) -> None:
        if not _suits(entries, factor, matrix, out):
            return TORCH_ENTRIES.matmul(entries, factor, matrix, out)
        assert out.shape == (len(factor), matrix.shape[1]), out.shape
        self._multiply("grpo_matmul", entries, factor, matrix, out, add=False)

    def transposed_matmul(
        self, entries: Entries, factor: Tensor, rows: Tensor, out: Tensor, add: bool
    ) -> None:
        if not _suits(entries, factor, rows, out):
            return TORCH_ENTRIES.transposed_matmul(entries, factor, rows, out, add)
        assert rows.shape == (len(factor), out.shape[1]), (rows.shape, out.shape)
        self._multiply("grpo_transposed_matmul", entries, factor, rows, out, add)

    def _multiply(
        self, kernel: str, entries: Entries, factor: Tensor, source: Tensor, out: Tensor, add: bool
    ) -> None:
        entries = Entries(*(x.contiguous() for x in entries))
        factor, source, target = row_vector(factor, len(entries.used)), unit_stride(source), out
        if out.stride(1) != 1:
            target = out.contiguous()
        product = Product(
            factor=factor.data_ptr(),
            source=source.data_ptr(),
            out=target.data_ptr(),
            source_stride=source.stride(0),
            out_rows=out.shape[0],
            out_stride=target.stride(0),
            width=out.shape[1],
            source_dtype=DTYPES[source.dtype],
            out_dtype=DTYPES[out.dtype],
            add=add,
        )
        threads = torch.get_num_threads()
        getattr(library(), kernel)(_view(entries), product, self._isa_rank, threads)
        if target is not out:
            out.copy_(target)


NATIVE_ENTRIES = NativeEntries()


def _suits(entries: Entries, factor: Tensor, source: Tensor, out: Tensor) -> bool:
    """Return whether the native products have these dtypes."""
    fp32 = torch.float32
    if (entries.values.dtype, factor.dtype) != (fp32, fp32):
        return False
    return source.dtype in DTYPES and out.dtype in (source.dtype, fp32)


def _view(entries: Entries) -> EntriesView:
    """Return the C view of entries whose memory the caller keeps alive."""
    rows, slots = entries.ids.shape
    return EntriesView(*map(pointer, entries[:3]), rows, slots)
