"""The one loop of the heavy part: chunks of rows through logits, statistics and gradients.

Every schedule is this loop. Without ``middle`` it is the forward; with it, each chunk's logits are
turned into gradients while they are there, so forward and backward share one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.logprob.head import Head, accumulate_dweight, logits_dtype, project
from grpo_kernels.logprob.memory import on_huge_pages
from grpo_kernels.logprob.rows import (
    RowKernels,
    RowStats,
    clear_row_ends,
    concatenate,
    stats_dtype,
)

# (rows, their statistics) -> dlogp (C,), dentropy (C,) or None
Middle = Callable[[slice, RowStats], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Execution:
    """How the loop runs: which row kernels, which row ranges, which logits."""

    kernels: RowKernels
    chunks: Sequence[slice]  # of the T rows, in order, without gaps
    precision: str  # "fp32" | "input"
    extras: bool = False  # also is_top1 and sum_sq_probs


@dataclass(frozen=True)
class Needs:
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


class Gradients(NamedTuple):
    """Gradients of the head's inputs; fp32, or the input dtype where nothing is lost by it."""

    hidden: Tensor | None  # (T, D)
    weight: Tensor | None  # (V, D)
    bias: Tensor | None  # (V,)


def row_chunks(rows: int, size: int) -> list[slice]:
    """Ranges of at most ``size`` rows."""
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def forward(
    hidden: Tensor,  # (T, D)
    head: Head,
    target: Tensor,  # (T,)
    execution: Execution,
) -> RowStats:
    """Statistics of every row."""
    stats, _ = _sweep(hidden, head, target, execution, None, Needs(False, False, False), None)
    return stats


def forward_backward(
    hidden: Tensor,  # (T, D)
    head: Head,
    target: Tensor,  # (T,)
    execution: Execution,
    middle: Middle,
    needs: Needs,
    gradient_scale: Tensor | None = None,
) -> tuple[RowStats, Gradients]:
    """Statistics of every row and the gradients that ``middle`` asks for.

    ``gradient_scale`` (a () power of two) multiplies the gradients inside, and is divided out of
    the results: it keeps fp16 gradients of small losses from underflowing.
    """
    return _sweep(hidden, head, target, execution, middle, needs, gradient_scale)


def fp16_gradient_scale(hidden: Tensor, largest: Tensor) -> Tensor | None:
    """The scale that brings the ``largest`` coefficient (a () tensor) near 1; None unless fp16."""
    if hidden.dtype != torch.float16:
        return None
    exponent = -torch.log2(largest.float().clamp(min=2.0**-100)).round()
    return torch.exp2(exponent.clamp(-100, 100))


def _sweep(
    hidden: Tensor,
    head: Head,
    target: Tensor,
    execution: Execution,
    middle: Middle | None,
    needs: Needs,
    gradient_scale: Tensor | None,
) -> tuple[RowStats, Gradients]:
    weight = head.weight.to(hidden.dtype)
    columns = weight.shape[0]
    height = max((chunk.stop - chunk.start for chunk in execution.chunks), default=0)
    dtype = logits_dtype(hidden.dtype, execution.precision)
    tile = on_huge_pages(hidden.new_empty(height, columns, dtype=dtype))
    gradients = _empty_gradients(hidden, head, needs, len(execution.chunks))
    parts: list[RowStats] = []
    for chunk in execution.chunks:
        rows = hidden[chunk]
        logits = project(rows, weight, head.bias, tile[: rows.shape[0]])
        transform = head.transform.rows(chunk)
        stats = execution.kernels.stats(logits, target[chunk], transform, execution.extras)
        parts.append(stats)
        if middle is None:
            continue
        dlogp, dentropy = middle(chunk, stats)
        if gradient_scale is not None:
            dlogp = dlogp * gradient_scale
            dentropy = dentropy * gradient_scale if dentropy is not None else None
        dlogits = execution.kernels.dlogits_(
            logits, target[chunk], transform, stats, dlogp, dentropy, hidden.dtype
        )
        _add_gradients(gradients, dlogits, rows, weight, chunk, first=len(parts) == 1)
    _finish(gradients, gradient_scale)
    return _all_stats(parts, hidden, execution.extras), gradients


def _empty_gradients(hidden: Tensor, head: Head, needs: Needs, num_chunks: int) -> Gradients:
    """Uninitialised results, or zeros where no chunk will write."""
    make = torch.empty if num_chunks else torch.zeros
    wide = stats_dtype(hidden.dtype)
    exact = hidden.dtype != torch.float16  # fp16 results wait in fp32 for the loss scale
    dhidden_dtype = hidden.dtype if exact else wide
    # one chunk: one product, accumulated inside the GEMM and rounded once
    one_product = num_chunks <= 1 and exact and head.weight.dtype == hidden.dtype
    dweight_dtype = hidden.dtype if one_product else wide
    device = hidden.device
    return Gradients(
        make(hidden.shape, dtype=dhidden_dtype, device=device) if needs.hidden else None,
        on_huge_pages(make(head.weight.shape, dtype=dweight_dtype, device=device))
        if needs.weight
        else None,
        torch.zeros(head.weight.shape[0], dtype=wide, device=device) if needs.bias else None,
    )


def _add_gradients(
    gradients: Gradients, dlogits: Tensor, rows: Tensor, weight: Tensor, chunk: slice, first: bool
) -> None:
    if gradients.hidden is not None:
        clear_row_ends(dlogits)
        if gradients.hidden.dtype == dlogits.dtype:
            torch.mm(dlogits, weight, out=gradients.hidden[chunk])
        else:
            gradients.hidden[chunk] = torch.mm(dlogits, weight)
    if gradients.weight is not None:
        accumulate_dweight(gradients.weight, dlogits, rows, first)
    if gradients.bias is not None:
        gradients.bias.add_(torch.sum(dlogits, 0, dtype=gradients.bias.dtype))


def _finish(gradients: Gradients, gradient_scale: Tensor | None) -> None:
    if gradient_scale is None:
        return
    for gradient in gradients:
        if gradient is not None:
            gradient.div_(gradient_scale)


def _all_stats(parts: list[RowStats], hidden: Tensor, extras: bool) -> RowStats:
    if parts:
        return concatenate(parts)
    wide, count = stats_dtype(hidden.dtype), 5 if extras else 3
    none = [hidden.new_empty(0, dtype=torch.bool if i == 3 else wide) for i in range(count)]
    return RowStats(*none)
