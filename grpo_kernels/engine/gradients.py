"""The gradients of a head's inputs, summed from tiles of the gradient of its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from grpo_kernels.backends import RowStats, StatsGrad, Tile, TileGradient
from grpo_kernels.batch import host
from grpo_kernels.engine.lora import LoRAGradients
from grpo_kernels.engine.masked_rows import MaskedRows
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Rows, compact_plan, compact_rows_
from grpo_kernels.head import (
    SLICE_COLUMNS,
    Head,
    accumulate,
    stats_dtype,
    zero_row_padding,
)

if TYPE_CHECKING:
    from torch.distributed import Work


@dataclass(frozen=True)
class MainGrad:
    """A buffer that the weight's gradient is added to, GEMM by GEMM, in place of a new tensor."""

    total: Tensor  # (V, D) fp32, or fp64 for fp64 hidden states

    def add(
        self,
        dlogits: Tensor,  # (C, n), the gradient of some columns of the logits
        hidden: Tensor,  # (C, D)
        columns: slice = slice(None),  # which they are
        scale: Tensor | None = None,  # () contained in dlogits; it is divided out
    ) -> None:
        """Add ``dlogits.T @ hidden``; no second tensor of the size of the weight exists."""
        place = self.total[columns]
        if scale is None:
            accumulate(place, dlogits.t(), hidden, first=False)
            return
        for start in range(0, place.shape[0], SLICE_COLUMNS):
            part = slice(start, start + SLICE_COLUMNS)
            product = torch.empty_like(place[part])
            accumulate(product, dlogits[:, part].t(), hidden, first=True)
            place[part].addcdiv_(product, scale)


@dataclass(frozen=True)
class Needs:
    """Which gradients are wanted."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    lora_a: bool = False
    lora_b: bool = False
    main_grad: MainGrad | None = None  # where that of the weight is added; None: a new tensor
    wide: bool = False  # that of the weight in fp32, to be scaled before it is rounded

    @staticmethod
    def of(inputs: Sequence[Tensor | None]) -> Needs:
        """Return those of a head's inputs that autograd tracks."""
        enabled = torch.is_grad_enabled()
        wanted = [enabled and x is not None and x.requires_grad for x in inputs]
        return Needs(*wanted)  # type: ignore[arg-type]

    @property
    def of_inputs(self) -> list[bool]:
        """Which of a head's inputs get a gradient, in their order."""
        return [self.hidden, self.weight, self.bias, self.lora_a, self.lora_b]

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias or self.lora_a or self.lora_b

    @property
    def of_head(self) -> bool:
        """Whether a gradient with an entry per id of the vocabulary is wanted."""
        return self.weight or self.bias or self.lora_b

    @property
    def of_rows(self) -> Needs:
        """The others of these."""
        return replace(self, weight=False, bias=False, lora_b=False, main_grad=None)

    @property
    def of_head_alone(self) -> Needs:
        """Those that :attr:`of_rows` leaves out."""
        return replace(self, hidden=False, lora_a=False)

    @property
    def new_weight(self) -> bool:
        """Whether the weight's gradient is a tensor of its own."""
        return self.weight and self.main_grad is None

    def lora(self, rows: Rows) -> LoRAGradients | None:
        """Return sums for the gradients of the head's LoRA; None where there are none."""
        lora = rows.head.lora
        if lora is None or not (self.hidden or self.lora_a or self.lora_b):
            return None
        wanted = dict(of_hidden=self.hidden, of_a=self.lora_a, of_b=self.lora_b)
        wide, shard = lora.wide(rows.hidden.dtype), rows.head.shard
        return LoRAGradients(wide, rows.hidden, shard, **wanted)


class Gradients(NamedTuple):
    """Gradients of the head's inputs; fp32, or the input dtype where nothing is lost by it."""

    hidden: Tensor | None = None  # (T, D)
    weight: Tensor | None = None  # (V, D)
    bias: Tensor | None = None  # (V,)
    lora_a: Tensor | None = None  # (r, D)
    lora_b: Tensor | None = None  # (V, r)

    def with_lora(self, sums: LoRAGradients | None) -> Gradients:
        """Complete them with what has been summed of an adapter's."""
        if sums is None:
            return self
        da, db = sums.finish(self.hidden)
        return self._replace(lora_a=da, lora_b=db)

    def joined(self, others: Gradients) -> Gradients:
        """Return these and the others; no input has both."""
        return Gradients(*(x if y is None else y for x, y in zip(self, others, strict=True)))

    def times_(self, factor: Tensor) -> Gradients:
        """Multiply them in place by a () tensor."""
        for gradient in self:
            if gradient is not None:
                gradient.mul_(factor)
        return self


def fp16_scale(outer: StatsGrad) -> Tensor | None:
    """Return the power of two, (), that brings the largest to 1/2 to 1; None for no values.

    Without it fp16 gradients of small losses underflow, and those of huge ratios overflow; above 1
    large hidden states would that are multiplied with them.
    """
    largest = [x.abs().amax().float() for x in outer if x is not None and x.numel()]
    if not largest:
        return None
    exponent = -torch.log2(torch.stack(largest).amax().clamp(min=2.0**-100)).ceil()
    return torch.exp2(exponent.clamp(-100, 100))


class Chunk(NamedTuple):
    """A chunk of rows whose logits are there, and what is known of them."""

    rows: Rows
    part: slice  # of all rows
    tile: Tile  # may be overwritten
    stats: RowStats
    masked: MaskedRows | None  # with a sampling mask


class TileGradients(Protocol):
    """What becomes of the gradients of tiles of logits."""

    def take(self, chunk: Chunk, outer: StatsGrad, route: Route) -> None:
        """Take a chunk, whose statistics have the gradients ``outer``."""
        ...

    def finish(self) -> Gradients:
        """Return the gradients of the head's inputs; nothing is taken afterwards."""
        ...


class GradientSums:
    """Implements :class:`TileGradients` by GEMMs: the sums over chunks of rows."""

    def __init__(self, rows: Rows, needs: Needs, num_chunks: int) -> None:
        self._sums = _uninitialised(rows.hidden, rows.head, needs, num_chunks)
        self._shard = rows.head.shard
        self._over_ranks: list[Work] = []
        self._lora = needs.lora(rows)
        self._main_grad = needs.main_grad if needs.weight else None
        self._first = True
        self._is_fp16 = rows.hidden.dtype == torch.float16
        self._scale: Tensor | None = None  # () contained in all sums, divided out at the end

    def take(self, chunk: Chunk, outer: StatsGrad, route: Route) -> None:
        """Add the share of a chunk's rows that have a gradient."""
        rows, part, tile, stats, masked = chunk
        outer = self.scaled(outer)
        moves = compact_plan(outer.nonzero)
        if moves is not None:
            order = torch.tensor(moves, dtype=torch.int64)  # there may be none
            rows, stats, outer = rows.at(order), stats.rows(order), outer.rows(order)
            tile = Tile(compact_rows_(tile.logits, moves), rows.target, rows.head.transform)
            masked = masked.at(order) if masked is not None else None
        dlogits = route.backend.dlogits_(tile, stats, outer, rows.hidden.dtype)
        if masked is not None and outer.dmasked is not None:
            masked.add_gradient_(dlogits, outer.dmasked)
        self.add(TileGradient(dlogits), part, rows)

    def scaled(self, outer: StatsGrad) -> StatsGrad:
        """Multiply a chunk's coefficients by the scale that fp16 needs, which never rises.

        What is summed already follows where it falls: to a huge importance ratio, for example.
        """
        scale = fp16_scale(outer) if self._is_fp16 else None
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
        self._wait()
        self._sums.times_(factor)
        if self._lora is not None:
            self._lora.times_(factor)

    def add(self, gradient: TileGradient, part: slice, chunk: Rows) -> None:
        """Add the share of the range ``part``; the gradient has the dtype of the hidden states.

        ``chunk`` has the rows of the range that have a gradient, by their places in it.
        """
        where: slice | Tensor = part
        if chunk.index is not None:
            where = chunk.index + part.start if part.start else chunk.index
        dlogits = gradient.dlogits
        if self._sums.hidden is not None:
            self._set_rows(self._sums.hidden, gradient, part, where, chunk)
            if self._shard is not None:  # beside the GEMMs that follow
                self._over_ranks.append(self._shard.start_sum(self._sums.hidden[part]))
        if self._sums.weight is not None or self._main_grad is not None:
            hidden = gradient.weighted(chunk.hidden)
            if self._sums.weight is not None:
                accumulate(self._sums.weight, dlogits.t(), hidden, self._first)
            if self._main_grad is not None:
                self._main_grad.add(dlogits, hidden, scale=self._scale)
        if self._sums.bias is not None:
            self._add_to_bias(self._sums.bias, gradient)
        if self._lora is not None:
            self._lora.add(gradient, where, slice(0, dlogits.shape[1]))
        self._first = False

    def finish(self) -> Gradients:
        """Return the gradients; nothing is added afterwards."""
        self._wait()
        gradients = self._sums.with_lora(self._lora)
        return gradients if self._scale is None else gradients.times_(1 / self._scale)

    def _wait(self) -> None:
        """Wait until the gradients of the hidden states are summed over the ranks."""
        for work in self._over_ranks:
            work.wait()
        self._over_ranks.clear()

    @staticmethod
    def _add_to_bias(dbias: Tensor, gradient: TileGradient) -> None:
        dlogits, factor = gradient
        if factor is None:
            dbias.add_(torch.sum(dlogits, 0, dtype=dbias.dtype))
        else:
            high = factor.to(dlogits.dtype)  # the factor in two parts: a sum hides no rounding
            parts = torch.stack([high, (factor - high).to(dlogits.dtype)], 1)
            sums = dbias.new_empty(dbias.shape[0], 2)
            accumulate(sums, dlogits.t(), parts, first=True)
            dbias.add_(sums.sum(1))

    @staticmethod
    def _set_rows(
        dhidden: Tensor, gradient: TileGradient, part: slice, where: slice | Tensor, chunk: Rows
    ) -> None:
        """Set the chunk's rows of ``dhidden``; rows that were dropped have no gradient."""
        dlogits, factor = gradient
        zero_row_padding(dlogits)
        weight = chunk.head.weight
        if isinstance(where, slice):
            place = dhidden[where]
        else:
            place = dhidden.new_empty(chunk.hidden.shape)
        if factor is not None:
            wide = torch.empty_like(place, dtype=factor.dtype)
            accumulate(wide, dlogits, weight, first=True)
            torch.mul(wide, factor[:, None], out=place)
        elif place.dtype == dlogits.dtype:
            torch.mm(dlogits, weight, out=place)
        else:
            accumulate(place, dlogits, weight, first=True)
        if not isinstance(where, slice):
            dhidden[part].zero_()
            dhidden.index_copy_(0, where, place)


def _uninitialised(hidden: Tensor, head: Head, needs: Needs, num_chunks: int) -> Gradients:
    """Return uninitialised results, or zeros where no chunk will write."""
    make = torch.empty if num_chunks else torch.zeros
    wide = stats_dtype(hidden.dtype)
    exact = hidden.dtype != torch.float16  # fp16 results wait in fp32 for the loss scale
    # one chunk: one GEMM, accumulated inside of it and rounded once
    one_gemm = num_chunks <= 1 and exact and head.weight.dtype == hidden.dtype
    dhidden = dweight = dbias = None
    if needs.hidden:
        dtype = hidden.dtype if exact and head.shard is None else wide  # the ranks' are summed
        dhidden = make(hidden.shape, dtype=dtype, device=hidden.device)
    if needs.new_weight:
        dtype = hidden.dtype if one_gemm and not needs.wide else wide
        dweight = make(head.weight.shape, dtype=dtype, device=hidden.device)
    if needs.bias:
        dbias = torch.zeros(head.weight.shape[0], dtype=wide, device=hidden.device)
    return Gradients(dhidden, dweight, dbias)
