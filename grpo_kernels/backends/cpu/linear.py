"""The native forward of a linear head: statistics without a tile of logits, or along with one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.backends.base import FormsLogits, RowStats
from grpo_kernels.backends.cpu.abi import Linear, Update
from grpo_kernels.backends.cpu.rows import (
    DTYPES,
    NativeRows,
    empty_stats,
    library,
    pointer,
    stats_pointers,
    tile_view,
    unit_stride,
)
from grpo_kernels.head import Head


class NativeLinear:
    """``LinearStats`` for fp32, bf16 and fp16 on a CPU.

    The GEMM sums in fp32. A row's bits depend neither on the other rows nor, without LoRA,
    on ``torch.get_num_threads()``. ``RowStats.lse`` is fp64, as that of ``NativeRows``.
    """

    def __init__(self, isa_rank: int = 0) -> None:
        self._isa_rank = isa_rank  # index into ``cpu.isas()``

    def __call__(
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


class NativeHeadRows(NativeRows, FormsLogits):
    """``NativeRows`` that also form fp32 logits, with their statistics."""

    def __init__(self, isa_rank: int = 0) -> None:
        super().__init__(isa_rank)
        self._linear = NativeLinear(isa_rank)

    def forms(self, dtype: torch.dtype, logits_dtype: torch.dtype) -> bool:
        """Return whether ``logits_stats`` takes such inputs and gives such logits."""
        return logits_dtype == torch.float32 and dtype in DTYPES

    def logits_stats(
        self, hidden: Tensor, head: Head, target: Tensor, extras: bool, out: Tensor
    ) -> RowStats:
        """Fill ``out`` (C, V) with the raw logits; the statistics have ``NativeLinear``'s bits."""
        return self._linear(hidden, head, target, "fp32", extras, out)


# Rows for which torch forms the small factor of an update at a time: always as many, and each
# begins where a vector does, so that a row's bits are its own. MKL's depend on a row's alignment.
_FACTOR_ROWS = 256
_LANES = 16  # tokens of the widest vector
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


NATIVE_LINEAR = NativeLinear()
NATIVE_HEAD_ROWS = NativeHeadRows()
