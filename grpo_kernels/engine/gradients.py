"""The gradients of a head's inputs, summed from tiles of the gradient of its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import grpo_kernels.batch.host as host
from grpo_kernels.backends.base import clear_row_ends, stats_dtype
from grpo_kernels.engine.lora_gradients import LoRAGradients
from grpo_kernels.engine.weight_sink import WeightSink
from grpo_kernels.head.head import Head, accumulate
from grpo_kernels.head.memory import on_huge_pages


class StatsGradients(NamedTuple):
    """Gradients of a chunk's statistics, each (C,) or None for zeros."""

    dlogp: Tensor | None
    dentropy: Tensor | None = None
    dmasked: Tensor | None = None  # of masked_logp

    @property
    def nonzero(self) -> Tensor | None:
        """(C,) bool, the rows with a gradient that is not 0; None if all are zeros."""
        given = [x != 0 for x in self if x is not None]
        return torch.stack(given).any(0) if given else None

    def rows(self, index: slice | Tensor) -> StatsGradients:
        """The same for a subset of the rows."""
        return StatsGradients(*(x[index] if x is not None else None for x in self))

    @property
    def fp16_scale(self) -> Tensor | None:
        """Return the power of two, (), that brings the largest of them near 1; None for no values.

        Without it fp16 gradients of small losses underflow, and those of huge ratios overflow.
        """
        largest = [x.abs().amax().float() for x in self if x is not None and x.numel()]
        if not largest:
            return None
        exponent = -torch.log2(torch.stack(largest).amax().clamp(min=2.0**-100)).round()
        return torch.exp2(exponent.clamp(-100, 100))

    def times(self, scale: Tensor | None) -> StatsGradients:
        """The same, multiplied by a () tensor."""
        if scale is None:
            return self
        return StatsGradients(*(x * scale if x is not None else None for x in self))


@dataclass(frozen=True)
class Needs:
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool
    lora_a: bool = False
    lora_b: bool = False
    weight_sink: WeightSink | None = None  # where that of the weight is added; None: a new tensor

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias or self.lora_a or self.lora_b


class Gradients(NamedTuple):
    """Gradients of the head's inputs; fp32, or the input dtype where nothing is lost by it."""

    hidden: Tensor | None  # (T, D)
    weight: Tensor | None  # (V, D)
    bias: Tensor | None  # (V,)
    lora_a: Tensor | None = None  # (r, D)
    lora_b: Tensor | None = None  # (V, r)

    def unscaled(self, scale: Tensor | None) -> Gradients:
        """The same, divided in place by a () tensor that they contain."""
        for gradient in self:
            if gradient is not None and scale is not None:
                gradient.div_(scale)
        return self


class Chunk(NamedTuple):
    """C rows of all, on their way through the loop."""

    range: slice  # which rows these are
    rows: Tensor  # (C, D)
    head: Head
    target: Tensor  # (C,)
    left: Tensor | None = None  # (C,) which of all rows are left, where some of the range are not

    @property
    def where(self) -> slice | Tensor:
        return self.range if self.left is None else self.left

    def rows_at(self, order: Tensor) -> Chunk:
        """Some of the rows, by their places in this chunk."""
        index = order + self.range.start
        return Chunk(self.range, self.rows[order], self.head.rows(order), self.target[order], index)


def adapter_gradients(hidden: Tensor, head: Head, needs: Needs) -> LoRAGradients | None:
    """The gradients of a head's LoRA, to be summed; None where there are none."""
    if head.lora is None or not (needs.hidden or needs.lora_a or needs.lora_b):
        return None
    wanted = dict(of_hidden=needs.hidden, of_a=needs.lora_a, of_b=needs.lora_b)
    return LoRAGradients(head.lora.wide(hidden.dtype), hidden, **wanted)


def with_adapter(gradients: Gradients, adapter: LoRAGradients | None) -> Gradients:
    """``gradients``, complete with what has been summed of the adapter's."""
    if adapter is None:
        return gradients
    da, db = adapter.finish(gradients.hidden)
    return gradients._replace(lora_a=da, lora_b=db)


class GradientSums:
    """What the loop over chunks of rows adds up."""

    def __init__(
        self,
        hidden: Tensor,  # (T, D)
        head: Head,
        needs: Needs,
        num_chunks: int,
    ) -> None:
        self._sums = _uninitialised(hidden, head, needs, num_chunks)
        self._adapter = adapter_gradients(hidden, head, needs)
        self._sink = needs.weight_sink if needs.weight else None
        self._first = True
        self._is_fp16 = hidden.dtype == torch.float16
        self._scale: Tensor | None = None  # () contained in all sums, divided out at the end

    def scaled(self, outer: StatsGradients) -> StatsGradients:
        """Multiply a chunk's coefficients by the scale that fp16 needs, which never rises.

        What is summed already follows where it falls: to a huge importance ratio, for example.
        """
        scale = outer.fp16_scale if self._is_fp16 else None
        if scale is None:
            return outer
        if self._scale is not None:
            scale = torch.minimum(scale, self._scale)
            self._rescale(scale / self._scale)
        self._scale = scale
        return outer.times(scale)

    def _rescale(self, factor: Tensor) -> None:
        if host.reading_is_free(factor) and factor.item() == 1:
            return
        for total in self._sums:
            if total is not None:
                total.mul_(factor)
        if self._adapter is not None:
            self._adapter.rescale(factor)

    def add(self, dlogits: Tensor, chunk: Chunk) -> None:
        """A chunk's share; ``dlogits`` (C, V) has the dtype of the hidden states."""
        if self._sums.hidden is not None:
            _set_rows(self._sums.hidden, dlogits, chunk)
        if self._sums.weight is not None:
            accumulate(self._sums.weight, dlogits.t(), chunk.rows, self._first)
        if self._sink is not None:
            self._sink.add(dlogits, chunk.rows, scale=self._scale)
        if self._sums.bias is not None:
            self._sums.bias.add_(torch.sum(dlogits, 0, dtype=self._sums.bias.dtype))
        if self._adapter is not None:
            self._adapter.add(dlogits, chunk.where, slice(0, dlogits.shape[1]))
        self._first = False

    def finish(self) -> Gradients:
        return with_adapter(self._sums, self._adapter).unscaled(self._scale)


def _uninitialised(hidden: Tensor, head: Head, needs: Needs, num_chunks: int) -> Gradients:
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
        if needs.weight and needs.weight_sink is None
        else None,
        torch.zeros(head.weight.shape[0], dtype=wide, device=device) if needs.bias else None,
    )


def _set_rows(dhidden: Tensor, dlogits: Tensor, chunk: Chunk) -> None:
    """The chunk's rows of ``dhidden``; those that were dropped have no gradient."""
    clear_row_ends(dlogits)
    place, weight = dhidden[chunk.where], chunk.head.weight  # a copy where rows were dropped
    if place.dtype == dlogits.dtype:
        torch.mm(dlogits, weight, out=place)
    else:
        accumulate(place, dlogits, weight, first=True)
    if chunk.left is not None:
        dhidden[chunk.range] = 0
        dhidden[chunk.left] = place
