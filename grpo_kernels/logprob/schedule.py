"""The one loop of the heavy part: chunks of rows through logits, statistics and gradients.

Every schedule is this loop. Without ``middle`` it is the forward; with it, each chunk's logits are
turned into gradients while they are there, so forward and backward share one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.kept import KeptSet
from grpo_kernels.logprob.head import Head, accumulate, logits_dtype, project
from grpo_kernels.logprob.kept import KeptRows
from grpo_kernels.logprob.memory import on_huge_pages
from grpo_kernels.logprob.precision import products
from grpo_kernels.logprob.rows import (
    EXTRAS,
    FormsLogits,
    LinearStats,
    RowKernels,
    RowMiddle,
    RowStats,
    clear_row_ends,
    concatenate,
    dtype_of,
    stats_dtype,
)


class StatsGradients(NamedTuple):
    """Gradients of a chunk's statistics, each (C,) or None for zeros."""

    dlogp: Tensor | None
    dentropy: Tensor | None = None
    dkept: Tensor | None = None  # of kept_logp

    def rows(self, index: slice) -> StatsGradients:
        """The same for a range of the rows."""
        return StatsGradients(*(x[index] if x is not None else None for x in self))

    def times(self, scale: Tensor | None) -> StatsGradients:
        """The same, multiplied by a () tensor."""
        if scale is None:
            return self
        return StatsGradients(*(x * scale if x is not None else None for x in self))


Middle = Callable[[slice, RowStats], StatsGradients]  # of a row range and its statistics


@dataclass(frozen=True)
class Execution:
    """How the loop runs: which row kernels, which row ranges, which logits."""

    kernels: RowKernels
    chunks: Sequence[slice]  # of the T rows, in order, without gaps
    precision: str  # one of head.PRECISIONS
    extras: bool = False  # also is_top1, sum_sq_probs, max_logit and min_logit
    linear_stats: LinearStats | None = None  # forward without a tile of logits
    kept: KeptSet | None = None  # also kept_logp
    fixed_rows: int | None = None  # every tile is filled up to these rows with zeros


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
    if execution.linear_stats is not None:
        with products(hidden.device, execution.precision):
            return execution.linear_stats(
                hidden, head, target, execution.precision, execution.extras
            )
    stats, _ = _sweep(hidden, head, target, execution, None, Needs(False, False, False), None)
    return stats


def forward_backward(
    hidden: Tensor,  # (T, D)
    head: Head,
    target: Tensor,  # (T,)
    execution: Execution,
    middle: Middle | RowMiddle,
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
    middle: Middle | RowMiddle | None,
    needs: Needs,
    gradient_scale: Tensor | None,
) -> tuple[RowStats, Gradients]:
    gradients = _empty_gradients(hidden, head, needs, len(execution.chunks))
    weight = head.weight.to(hidden.dtype)
    head = replace(head, weight=weight)
    height = max((chunk.stop - chunk.start for chunk in execution.chunks), default=0)
    shape = (execution.fixed_rows or height, weight.shape[0])
    tile = on_huge_pages(hidden.new_empty(shape, dtype=_tile_dtype(hidden, execution)))
    parts: list[RowStats] = []
    for chunk in execution.chunks:
        part = _Part(chunk, hidden[chunk], head.rows(chunk), target[chunk])
        stats, dlogits = _rows_pass(part, tile, execution, middle, gradient_scale)
        parts.append(stats)
        if dlogits is not None:
            with products(hidden.device, execution.precision):
                _add_gradients(gradients, dlogits, part, first=len(parts) == 1)
    _finish(gradients, gradient_scale)
    return _all_stats(parts, hidden, execution), gradients


class _Part(NamedTuple):
    """A chunk of C rows."""

    range: slice
    rows: Tensor  # (C, D)
    head: Head
    target: Tensor  # (C,)


def _rows_pass(
    part: _Part,
    tile: Tensor,
    execution: Execution,
    middle: Middle | RowMiddle | None,
    gradient_scale: Tensor | None,
) -> tuple[RowStats, Tensor | None]:
    """Logits of a chunk in ``tile``, their statistics and, with ``middle``, their gradient."""
    transform, target, dtype = part.head.transform, part.target, part.rows.dtype
    if isinstance(middle, RowMiddle):
        logits = _product(part.rows, part.head, tile, execution)[: target.numel()]
        return middle.gradient_(part.range, logits, target, transform, dtype)
    logits, stats = _logits(part.rows, part.head, target, tile, execution)
    kept = None
    if execution.kept is not None:
        kept = KeptRows.of(logits, target, transform, execution.kept.take(part.range))
        stats = stats._replace(kept_logp=kept.logp.to(stats.logp.dtype))
    if middle is None:
        return stats, None
    dlogp, dentropy, dkept = middle(part.range, stats).times(gradient_scale)
    if dlogp is None:
        dlogp = torch.zeros_like(stats.logp)
    dlogits = execution.kernels.dlogits_(logits, target, transform, stats, dlogp, dentropy, dtype)
    if kept is not None and dkept is not None:
        kept.add_gradient_(dlogits, dkept)
    return stats, dlogits


def _tile_dtype(hidden: Tensor, execution: Execution) -> torch.dtype:
    return logits_dtype(hidden.dtype, execution.precision)


def _logits(
    rows: Tensor,  # (C, D)
    head: Head,  # of these rows
    target: Tensor,  # (C,)
    tile: Tensor,  # (at least C, V)
    execution: Execution,
) -> tuple[Tensor, RowStats]:
    """The raw logits (C, V) of a chunk, in ``tile``, and their statistics."""
    count, transform, kernels = rows.shape[0], head.transform, execution.kernels
    if isinstance(kernels, FormsLogits) and kernels.forms(rows.dtype, tile.dtype):
        logits = tile[:count]
        return logits, kernels.logits_stats(rows, head, target, execution.extras, logits)
    logits = _product(rows, head, tile, execution)
    if execution.fixed_rows is not None:
        target = _filled_up(target, execution.fixed_rows)
        if isinstance(transform.temperature, Tensor):
            temperature = _filled_up(transform.temperature, execution.fixed_rows, value=1)
            transform = replace(transform, temperature=temperature)
    stats = kernels.stats(logits, target, transform, execution.extras)
    return logits[:count], stats.rows(slice(count))


def _product(rows: Tensor, head: Head, tile: Tensor, execution: Execution) -> Tensor:
    """The raw logits of a chunk, and of the zeros that fill it up, in ``tile``.

    How a library multiplies a row depends on the number of rows, and on where they lie in memory.
    With ``fixed_rows`` both are always the same, and so are the row's bits.
    """
    if execution.fixed_rows is not None:
        rows = _filled_up(rows, execution.fixed_rows)
    with products(rows.device, execution.precision):
        return project(rows, head.weight, head.bias, tile[: rows.shape[0]])


def _filled_up(x: Tensor, rows: int, value: int = 0) -> Tensor:
    filled = x.new_full((rows, *x.shape[1:]), value)
    filled[: x.shape[0]] = x
    return filled


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


def _add_gradients(gradients: Gradients, dlogits: Tensor, part: _Part, first: bool) -> None:
    if gradients.hidden is not None:
        clear_row_ends(dlogits)
        place, weight = gradients.hidden[part.range], part.head.weight
        if place.dtype == dlogits.dtype:
            torch.mm(dlogits, weight, out=place)
        else:
            accumulate(place, dlogits, weight, first=True)
    if gradients.weight is not None:
        accumulate(gradients.weight, dlogits.t(), part.rows, first)
    if gradients.bias is not None:
        gradients.bias.add_(torch.sum(dlogits, 0, dtype=gradients.bias.dtype))


def _finish(gradients: Gradients, gradient_scale: Tensor | None) -> None:
    if gradient_scale is None:
        return
    for gradient in gradients:
        if gradient is not None:
            gradient.div_(gradient_scale)


def _all_stats(parts: list[RowStats], hidden: Tensor, execution: Execution) -> RowStats:
    if parts:
        return concatenate(parts)
    names = ["logp", "entropy", "lse"]
    names += EXTRAS if execution.extras else ()
    names += ["kept_logp"] if execution.kept is not None else []
    wide = stats_dtype(hidden.dtype)
    none = {name: dtype_of(name, wide) for name in names}
    return RowStats(**{name: hidden.new_empty(0, dtype=dtype) for name, dtype in none.items()})
