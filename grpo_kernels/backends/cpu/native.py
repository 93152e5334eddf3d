"""The native backend: kernels of ``csrc`` for fp32, bf16 and fp16 on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.backends.base import Entries, RowStats, StatsGrad, Tile, output_view
from grpo_kernels.backends.cpu.abi import (
    EntriesView,
    Extraction,
    Gradient,
    Linear,
    Product,
    Update,
)
from grpo_kernels.backends.cpu.library import (
    DTYPES,
    announce_absence,
    empty_stats,
    isas,
    library,
    pointer,
    row_vector,
    stats_pointers,
    tile_view,
    unavailable,
    unit_stride,
)
from grpo_kernels.backends.torch_backend import Chunked
from grpo_kernels.head import Head


class Native(Chunked):
    """What its kernels have no dtypes for, plain torch does.

    Rows are spread over ``torch.get_num_threads()`` threads; a row's result depends neither on that
    number (but for an adapter's) nor on the other rows. Scale, softcap and temperature must be
    positive.

    ``RowStats.lse`` is fp64 here, whatever the logits: the gradient's probabilities are
    ``exp(z - lse)``, and fp32 would round an lse of 1e4 by 5e-4.
    """

    name = "cpu"

    def __init__(self, isa_rank: int = 0) -> None:
        self._isa_rank = isa_rank  # index into ``isas()``

    def unavailable(self) -> str | None:
        return unavailable()

    def unsuited(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return f"the tensors are on {device.type}"
        if dtype == torch.float64:
            return "the native kernels have no fp64"
        announce_absence()  # once, where it would have served
        return None

    def numerics(self, dtype: torch.dtype, head: Head, precision: str, tiled: bool) -> list[str]:
        return [isas()[self._isa_rank]]

    def stats(self, tile: Tile, extras: bool) -> RowStats:
        rows, columns = tile.logits.shape
        stats = empty_stats(rows, extras)
        view = tile_view(tile.logits, rows, columns, tile.target, tile.transform)
        out = stats_pointers(stats)
        library().grpo_stats(view, out, self._isa_rank, torch.get_num_threads())
        return stats

    def dlogits_(
        self,
        tile: Tile,
        stats: RowStats,
        outer: StatsGrad,
        out_dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        logits = tile.logits
        assert out_dtype == logits.dtype or (
            logits.dtype == torch.float32 and out_dtype in DTYPES
        ), out_dtype
        rows, columns = logits.shape
        view = tile_view(logits, rows, columns, tile.target, tile.transform)
        dlogp = torch.zeros_like(stats.logp) if outer.dlogp is None else outer.dlogp
        vectors = [
            row_vector(stats.logp, rows),
            row_vector(stats.entropy, rows),
            row_vector(stats.lse, rows, torch.float64),
            row_vector(dlogp, rows),
            None if outer.dentropy is None else row_vector(outer.dentropy, rows),
        ]
        place = (None, 0) if out is None else (out.data_ptr(), out.stride(0))
        gradient = Gradient(*(pointer(vector) for vector in vectors), *place, DTYPES[out_dtype])
        library().grpo_dlogits(view, gradient, self._isa_rank, torch.get_num_threads())
        return output_view(logits, out_dtype) if out is None else out

    def has_linear_stats(self, dtype: torch.dtype, head: Head, precision: str) -> bool:
        return True

    def linear_stats(
        self,
        hidden: Tensor,  # (T, D)
        head: Head,
        target: Tensor,  # (T,)
        precision: str,
        extras: bool,
        logits: Tensor | None = None,  # (T, V) fp32, filled before the transform
    ) -> RowStats:
        assert precision in ("fp32", "input"), precision
        assert hidden.dtype in DTYPES and hidden.device.type == "cpu", (hidden.dtype, hidden.device)
        assert logits is None or logits.dtype == torch.float32, logits
        hidden, weight = unit_stride(hidden), unit_stride(head.weight.to(hidden.dtype))
        bias = None if head.bias is None else head.bias.float().contiguous()
        rows, columns = hidden.shape[0], weight.shape[0]
        assert weight.shape[1] == hidden.shape[1], (weight.shape, hidden.shape)
        assert bias is None or bias.shape == (columns,), bias.shape
        update = _LowRank.of(hidden, head)
        stats = empty_stats(rows, extras)
        # a name of its own: `linear` gets a copy, which keeps nothing alive
        tile = tile_view(logits, rows, columns, target, head.transform)
        linear = Linear(
            hidden=hidden.data_ptr(),
            weight=weight.data_ptr(),
            bias=pointer(bias),
            depth=hidden.shape[1],
            hidden_stride=hidden.stride(0),
            weight_stride=weight.stride(0),
            dtype=DTYPES[hidden.dtype],
            rounded=precision == "input",
            update=update.view() if update is not None else Update(),
            tile=tile,
        )
        threads = torch.get_num_threads()
        library().grpo_linear(linear, stats_pointers(stats), self._isa_rank, threads)
        return stats

    def forms_logits(self, dtype: torch.dtype, logits_dtype: torch.dtype) -> bool:
        return logits_dtype == torch.float32 and dtype in DTYPES

    def logits_stats(
        self, hidden: Tensor, head: Head, target: Tensor, extras: bool, out: Tensor
    ) -> RowStats:
        """Fill ``out`` with the raw logits; the statistics have ``linear_stats``' bits."""
        return self.linear_stats(hidden, head, target, "fp32", extras, out)

    def extract_entries(
        self, tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int
    ) -> Entries:
        if tile.logits.dtype not in DTYPES:
            return super().extract_entries(tile, stats, keys, allowed, slots)
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

    def entries_matmul(self, entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor) -> None:
        if not _suits(entries, factor, matrix, out):
            return super().entries_matmul(entries, factor, matrix, out)
        assert out.shape == (len(factor), matrix.shape[1]), out.shape
        self._multiply_entries("grpo_matmul", entries, factor, matrix, out, add=False)

    def entries_transposed_matmul(
        self, entries: Entries, factor: Tensor, rows: Tensor, out: Tensor, add: bool
    ) -> None:
        if not _suits(entries, factor, rows, out):
            return super().entries_transposed_matmul(entries, factor, rows, out, add)
        assert rows.shape == (len(factor), out.shape[1]), (rows.shape, out.shape)
        self._multiply_entries("grpo_transposed_matmul", entries, factor, rows, out, add)

    def _multiply_entries(
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


# Rows for which torch forms the small factor of an update at a time: always as many, and each
# begins where a vector does, so that a row's bits are its own. MKL's depend on a row's alignment.
_FACTOR_ROWS = 256
_LANES = 16  # tokens of the max_local_vocab vector
_RANK_STEP = 8  # kRankStep of csrc/linear.h


@dataclass(frozen=True)
class _LowRank:
    """What LoRA adds to the logits, as the kernel reads it; keeps its memory alive."""

    inner: Tensor  # (rank, tokens) fp32, both filled up with zeros
    outer: Tensor  # (V, rank) fp32

    @staticmethod
    def of(hidden: Tensor, head: Head) -> _LowRank | None:
        if head.lora is None:
            return None
        lora, (count, depth) = head.lora.wide(hidden.dtype), hidden.shape
        aligned = replace(lora, a=pad(lora.a, (0, -depth % _LANES)))
        missing = -lora.rank % _RANK_STEP
        outer = pad(lora.b, (0, missing)) if missing else lora.b.contiguous()
        inner = hidden.new_zeros(outer.shape[1], -(-count // _LANES) * _LANES, dtype=torch.float32)
        block = hidden.new_zeros(_FACTOR_ROWS, aligned.a.shape[1], dtype=torch.float32)
        for start in range(0, count, _FACTOR_ROWS):
            part = hidden[start : start + _FACTOR_ROWS]
            block[: part.shape[0], :depth] = part
            factor = aligned.inner(block)[: part.shape[0]]
            inner[: lora.rank, start : start + part.shape[0]] = factor.t()
        return _LowRank(inner.detach(), outer.detach())

    def view(self) -> Update:
        inner, outer = self.inner, self.outer
        return Update(inner.data_ptr(), outer.data_ptr(), inner.stride(0), inner.shape[0])


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
