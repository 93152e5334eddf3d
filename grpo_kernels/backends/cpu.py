"""The native backend: the kernels in ``csrc`` for fp32, bf16 and fp16 on a CPU, through ctypes.

If the library is missing, ``unavailable`` says why, and plain torch runs, which is as exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.backends.base import (
    Entries,
    RowStats,
    StatsGrad,
    Tile,
    TileGradient,
    empty_stats,
)
from grpo_kernels.backends.divergence import Divergence, Pair
from grpo_kernels.backends.entries import row_keys, sampled_blocks
from grpo_kernels.backends.native_library import (
    DTYPES,
    KERNELS,
    VIEWS,
    View,
    isas,
    load_library,
    require,
)
from grpo_kernels.backends.torch_backend import Backend
from grpo_kernels.head import Head, Transform


class Native(Backend):
    """Kernels for fp32, bf16 and fp16.

    Rows are spread over ``torch.get_num_threads()`` threads. A row's result does not depend on the
    number of threads (except with an adapter) or on the other rows. Scale, softcap and temperature
    must be positive.
    """

    name = "cpu"
    absence = (
        "Falling back to pure torch on the CPU, which is slower, because {}. Reinstall "
        "grpo-kernels with a C++17 compiler (g++ or clang++) on the PATH."
    )

    def __init__(self, isa_rank: int = 0) -> None:
        self._isa_rank = isa_rank  # index into ``isas()``

    def unavailable(self) -> str | None:
        library = load_library()
        return library if isinstance(library, str) else None

    def unsuited(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return f"the tensors are on {device.type}"
        return "the native kernels have no fp64" if dtype == torch.float64 else None

    def numerics(
        self,
        dtype: torch.dtype,
        head: Head,
        precision: str,
        tiled: bool,
    ) -> list[str]:
        return [isas()[self._isa_rank]]

    def _run(self, kernel: str, rows: int, subject: View, **more: Any) -> None:
        """Call a kernel; ``more`` are the fields of its second struct."""
        results = VIEWS[KERNELS[kernel][1]](rows, **more)
        getattr(load_library(), kernel)(subject, results, self._isa_rank, torch.get_num_threads())

    def _fill(self, kernel: str, subject: View, stats: RowStats) -> RowStats:
        self._run(
            kernel,
            len(stats.lse),
            subject,
            logp=stats.logprobs,
            entropy=stats.entropy,
            lse=stats.lse,
            is_top1=stats.is_top1,
            sum_sq_probs=stats.sum_sq_probs,
            max_logit=stats.max_logit,
            min_logit=stats.min_logit,
        )
        return stats

    def stats(self, tile: Tile, extras: bool) -> RowStats:
        stats = empty_stats(len(tile.target), tile.logits.device, extras)
        return self._fill("grpo_stats", _tile(tile), stats)

    def dlogits_(
        self,
        tile: Tile,
        stats: RowStats,
        grad_stats: StatsGrad,
        out: Tensor,
    ) -> Tensor:
        require(tile.logits.dtype in (out.dtype, torch.float32), out.dtype)
        dlogp = grad_stats.dlogp
        self._run(
            "grpo_dlogits",
            len(tile.target),
            _tile(tile),
            logp=stats.logprobs,
            entropy=stats.entropy,
            lse=stats.lse,
            dlogp=torch.zeros_like(stats.logprobs) if dlogp is None else dlogp,
            dentropy=grad_stats.dentropy,
            **_output(out, tile.logits.shape),
        )
        return out

    def divergence_sums(self, pair: Pair, divergence: Divergence) -> Tensor:
        sums = torch.empty((2, len(pair.lse)), dtype=torch.float64)
        self._compare(pair, divergence, sums=sums)
        return sums

    def divergence_gradient_(
        self,
        pair: Pair,
        divergence: Divergence,
        logp_grad_sum: Tensor,
        coefficient: Tensor,
        out: Tensor,
    ) -> Tensor:
        output = _output(out, pair.student.logits.shape)
        self._compare(
            pair, divergence, logp_grad_sum=logp_grad_sum, coefficient=coefficient, **output
        )
        return out

    def _compare(self, pair: Pair, divergence: Divergence, **results: Any) -> None:
        shape = pair.teacher.logits.shape
        require(shape == pair.student.logits.shape, shape)
        self._run(
            "grpo_divergence",
            shape[0],
            _tile(pair.student),
            teacher=_tile(pair.teacher),
            lse=pair.lse,
            teacher_lse=pair.teacher_lse,
            beta=divergence.beta,
            kind=divergence.index,
            **results,
        )

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
        hidden, weight = _rows(hidden), _rows(head.weight.to(hidden.dtype))
        bias = None if head.bias is None else head.bias.float().contiguous()
        columns, depth = weight.shape
        require(hidden.shape == (len(target), depth), hidden.shape)
        require(bias is None or bias.shape == (columns,), bias)
        require(logits is None or logits.dtype == torch.float32, logits)
        linear = VIEWS["Linear"](
            hidden=hidden,
            weight=weight,
            bias=bias,
            depth=depth,
            hidden_stride=hidden.stride(0),
            weight_stride=weight.stride(0),
            dtype=DTYPES[hidden.dtype],
            rounded=precision == "input",
            update=_low_rank(hidden, head),
            tile=_scores(target, head.transform, columns, logits),
        )
        return self._fill("grpo_linear", linear, empty_stats(len(hidden), hidden.device, extras))

    def forms_logits(self, dtype: torch.dtype, logits_dtype: torch.dtype) -> bool:
        return logits_dtype == torch.float32 and dtype in DTYPES

    def tail_sums(
        self,
        tile: Tile,
        stats: RowStats,
        weight: Tensor,
        cuts: Tensor,
        gradient: TileGradient | None = None,
        grad_stats: StatsGrad | None = None,
    ) -> Tensor:
        assert gradient is None, "the kernel computes it"
        require(cuts.dtype == torch.float32 and cuts.dim() == 1, cuts)
        rows, columns = tile.logits.shape
        blocks, sampled = sampled_blocks(rows, columns)
        sums = torch.empty((rows, 2, len(cuts)))
        self._run(
            "grpo_tail_sums",
            rows,
            _tile(tile),
            grad_stats=_grad_stats(stats, grad_stats),
            lse=stats.lse,
            weight=weight,
            cuts=cuts.contiguous(),
            sums=sums,
            num_cuts=len(cuts),
            blocks=blocks,
            sampled=sampled,
        )
        return sums

    def extract_entries(
        self,
        tile: Tile,
        stats: RowStats,
        seed: int,
        first: int,
        cuts: Tensor,
        slots: int,
        gradient: TileGradient | None = None,
        grad_stats: StatsGrad | None = None,
    ) -> Entries:
        assert gradient is None, "the kernel computes it"
        require(slots > 0, slots)
        rows = len(tile.target)
        entries = Entries.empty(rows, slots, tile.logits.device)
        self._run(
            "grpo_extract",
            rows,
            _tile(tile),
            grad_stats=_grad_stats(stats, grad_stats),
            logp=stats.logprobs,
            lse=stats.lse,
            keys=row_keys(seed, stats.lse, first),
            cuts=cuts,
            out=_entries(entries),
            error=entries.error,
            error_l1=entries.error_l1,
            expected_error=entries.expected_error,
            norm=entries.norm,
        )
        return entries

    def entries_matmul(
        self,
        entries: Entries,
        factor: Tensor,
        matrix: Tensor,
        out: Tensor,
    ) -> None:
        require(len(out) == len(factor), out.shape)
        self._multiply("grpo_matmul", entries, factor=factor, source=matrix, out=out, add=False)

    def entries_transposed_matmul(
        self,
        entries: Entries,
        factor: Tensor,
        rows: Tensor,
        out: Tensor,
        add: bool,
        count: int,
    ) -> None:
        require(len(rows) == len(factor), rows.shape)
        kernel = "grpo_transposed_matmul"
        self._multiply(kernel, entries, factor=factor, source=rows, out=out, add=add)

    def _multiply(
        self,
        kernel: str,
        entries: Entries,
        *,
        factor: Tensor,
        source: Tensor,
        out: Tensor,
        add: bool,
    ) -> None:
        """Run a sparse product with entries."""
        source = _rows(source)
        target = _rows(out)
        require(out.dtype in (source.dtype, torch.float32), out.dtype)
        self._run(
            kernel,
            len(factor),
            _entries(entries),
            factor=factor,
            source=source,
            source_stride=source.stride(0),
            source_dtype=DTYPES[source.dtype],
            out_rows=len(out),
            width=source.shape[1],
            add=add,
            **_output(target, (len(out), source.shape[1])),
        )
        if target is not out:
            out.copy_(target)


def _tile(tile: Tile) -> View:
    return _scores(tile.target, tile.transform, tile.logits.shape[1], tile.logits)


def _scores(target: Tensor, transform: Transform, columns: int, logits: Tensor | None) -> View:
    """Return the view of a tile, possibly without logits."""
    rows = target.numel()
    require(0 < columns < 2**31, columns)
    assert transform.logit_scale > 0 and (transform.softcap is None or transform.softcap > 0)
    if logits is not None:
        require(logits.shape == (rows, columns) and _rows(logits) is logits, logits.stride())
        require(rows <= 1 or logits.stride(0) >= columns, logits.stride())
    temperature = transform.temperature
    each = temperature if isinstance(temperature, Tensor) else None
    return VIEWS["Tile"](
        rows,
        logits=logits,
        rows=rows,
        columns=columns,
        row_stride=columns if logits is None else logits.stride(0),
        target=target,
        row_temperature=each,
        temperature=temperature if each is None else 0.0,
        logit_scale=transform.logit_scale,
        softcap=transform.softcap or 0.0,
        dtype=DTYPES[torch.float32 if logits is None else logits.dtype],
    )


# Rows for which torch computes the small factor of a LoRA update at a time: always the same number,
# each starting on a vector boundary, so that a row's bits depend only on the row. MKL's depend on a
# row's alignment.
_FACTOR_ROWS = 256
_LANES = 16  # tokens of the widest vector
_RANK_STEP = 8  # kRankStep of csrc/linear.h


def _low_rank(hidden: Tensor, head: Head) -> View:
    """Return the view of LoRA's (rank, tokens) and (V, rank) factors in fp32, padded with zeros."""
    if head.lora is None:
        return VIEWS["Update"]()
    count, depth = hidden.shape
    lora = head.lora.wide(hidden.dtype)
    aligned = replace(lora, a=pad(lora.a, (0, -depth % _LANES)))
    missing = -lora.rank % _RANK_STEP
    lora_b = pad(lora.b, (0, missing)) if missing else lora.b.contiguous()
    rank = lora_b.shape[1]
    require(lora_b.shape[0] == head.weight.shape[0] and lora_b.dtype == torch.float32, lora_b)
    lora_u = hidden.new_zeros(rank, -(-count // _LANES) * _LANES, dtype=torch.float32)
    block = hidden.new_zeros(_FACTOR_ROWS, aligned.a.shape[1], dtype=torch.float32)
    for start in range(0, count, _FACTOR_ROWS):
        part = hidden[start : start + _FACTOR_ROWS]
        block[: len(part), :depth] = part
        factor = aligned.project_down(block)[: len(part)]
        lora_u[: lora.rank, start : start + len(part)] = factor.t()
    stride = lora_u.stride(0)
    return VIEWS["Update"](lora_u=lora_u, lora_b=lora_b, lora_u_stride=stride, rank=rank)


def _grad_stats(stats: RowStats, grad_stats: StatsGrad | None) -> View:
    """Return the view of the gradients of log-probabilities and entropy, or an empty view."""
    if grad_stats is None:
        return VIEWS["GradStats"]()
    require(grad_stats.dlogp is not None and grad_stats.dentropy is not None, grad_stats)
    return VIEWS["GradStats"](
        len(stats.lse), entropy=stats.entropy, dlogp=grad_stats.dlogp, dentropy=grad_stats.dentropy
    )


def _entries(entries: Entries) -> View:
    ids = entries.ids.contiguous()
    values = entries.values.contiguous()
    rows, slots = ids.shape
    require(ids.dtype == torch.int32 and values.dtype == torch.float32, values.dtype)
    require(values.shape == ids.shape, values.shape)
    return VIEWS["Entries"](rows, ids=ids, values=values, used=entries.used, rows=rows, slots=slots)


def _output(out: Tensor, shape: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a matrix to be filled."""
    require(out.shape == shape and _rows(out) is out, (out.shape, out.stride()))
    return {"out": out, "out_stride": out.stride(0), "out_dtype": DTYPES[out.dtype]}


def _rows(matrix: Tensor) -> Tensor:
    """Return the matrix, copied unless its columns are contiguous."""
    require(matrix.dtype in DTYPES, matrix.dtype)
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()
