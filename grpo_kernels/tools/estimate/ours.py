"""Memory of this package's schedules, read off ``logprob/schedule.py`` and ``schedules.py``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grpo_kernels.backends import chunked
from grpo_kernels.engine.recompute import cut
from grpo_kernels.engine.sweep import chunk_height
from grpo_kernels.head import head as products
from grpo_kernels.head import mkl
from grpo_kernels.head.head import logits_dtype
from grpo_kernels.tools.estimate.shape import WIDE, HeadShape, Moment, Setting, library_bytes


def one_pass(head: HeadShape, setting: Setting, precision: str = "fp32") -> list[Moment]:
    """Gradients in the forward; the backward scales them by the loss's own gradient."""
    sweep = _Sweep.of(head, setting, precision, cast=head.mixed)
    rounded = sweep.rounded(head.weight_width)
    given = sweep.kept + sum(size for _, size in rounded)
    return [*sweep.moments(), Moment("the gradients in two dtypes", given)]


def two_pass(head: HeadShape, setting: Setting, precision: str = "fp32") -> list[Moment]:
    """Statistics first; the backward takes a slice of the vocabulary at a time."""
    if setting.sampling_mask:  # its backward is the loop of one_pass
        return one_pass(head, setting, precision)
    kept = logits_dtype(head.dtype, precision)
    fit = setting.rows(head, precision)
    slices = cut(setting.tokens, head.vocabulary, fit * head.vocabulary)
    tile = slices.elements * kept.itemsize
    # a weight of another dtype is cast in the forward, and again in the backward
    copy = head.size * head.width if head.mixed else 0
    dhidden, dweight = setting.tokens * head.hidden * WIDE, head.trained * head.weight_width
    narrow = len(slices.rows) > 1 and head.weight_width < WIDE
    waits = head.trained and (head.dtype == torch.float16 or narrow)
    columns = max(part.stop - part.start for part in slices.columns)
    waiting = columns * head.hidden * WIDE if waits else 0
    library = library_bytes(setting, fp32_products=head.width == WIDE)
    rounded = setting.tokens * head.hidden * head.width if head.width < WIDE else 0
    tiled = 0 if setting.forms_no_tile(head) else min(fit, setting.tokens)
    forward = tiled * head.vocabulary
    moments = [
        Moment("the forward's tile of logits", copy + forward * kept.itemsize),
        Moment("a slice's logits and the gradients", copy + tile + dhidden + dweight + waiting),
        Moment("the gradients in two dtypes", dhidden + rounded + dweight),
    ]
    return [Moment(each.when, each.bytes + library) for each in moments]


@dataclass(frozen=True, kw_only=True)
class _Sweep:
    """Sizes of the one loop, in bytes."""

    head: HeadShape
    setting: Setting
    single: bool  # one chunk: its weight gradient needs no fp32 accumulator
    exact: bool  # fp32 logits of 16-bit inputs
    rows: int
    tile: int
    passes: int  # temporaries of the row passes
    copy: int  # of the weight in the dtype of the hidden states
    dhidden: int
    dweight: int

    @classmethod
    def of(cls, head: HeadShape, setting: Setting, precision: str, cast: bool) -> _Sweep:
        kept = logits_dtype(head.dtype, precision)
        rows = setting.rows(head, precision)
        single = setting.tokens <= rows
        rows = min(chunk_height(setting.tokens, rows), setting.tokens)
        accumulates = WIDE if head.dtype == torch.float16 else head.width
        in_place = single and head.dtype != torch.float16 and not cast
        return cls(
            head=head,
            setting=setting,
            single=single,
            exact=kept.itemsize > head.width,
            rows=rows,
            tile=rows * head.vocabulary * kept.itemsize,
            passes=_row_pass_bytes(head, setting, rows),
            copy=head.size * head.width if cast else 0,
            dhidden=setting.tokens * head.hidden * accumulates,
            dweight=head.trained * (head.width if in_place else WIDE),
        )

    @property
    def kept(self) -> int:
        """The gradients as the loop leaves them."""
        return self.dhidden + self.dweight

    def rounded(self, weight_width: int) -> list[tuple[int, int]]:
        """(bytes of a gradient, bytes in the dtype it is returned in), where these differ."""
        head = self.head
        pairs = [
            (self.dhidden, self.setting.tokens * head.hidden * head.width),
            (self.dweight, head.trained * weight_width),
        ]
        return [pair for pair in pairs if pair[0] != pair[1]]

    def moments(self) -> list[Moment]:
        """What can be the peak inside the loop."""
        library = library_bytes(self.setting, fp32_products=self.exact or self.head.width == WIDE)
        base = self.tile + self.copy + library
        # until its first chunk is through, an uninitialised gradient holds no memory of a CPU
        early = 0 if self.setting.on_cpu and self.single else self.kept
        moments = [
            Moment("the tile of logits and the gradients", base + early + self.passes),
            Moment(
                "the tile, the gradients and their products",
                base + self.kept + self._accumulating(),
            ),
        ]
        if self.exact and not self.setting.in_place and self._upcasts:
            moments.append(
                Moment("the tile and fp32 copies for its product", base + early + self._upcasting())
            )
        return moments

    @property
    def _upcasts(self) -> bool:
        """Whether a CPU needs fp32 copies of 16-bit factors for an fp32 product."""
        return not mkl.available(self.head.dtype)

    def _upcasting(self) -> int:
        """Exact logits: fp32 copies of the rows and of a slice of the weight."""
        return (self.rows + self._slice()) * self.head.hidden * WIDE

    def _accumulating(self) -> int:
        """The fp32 weight gradient: fp32 copies of the rows and of a slice of the dlogits."""
        rounded = self.dweight > self.head.trained * self.head.width
        if not (self.setting.on_cpu and rounded and self._upcasts):
            return 0
        return self.rows * (self.head.hidden + self._slice()) * WIDE

    def _slice(self) -> int:
        return min(products.SLICE_COLUMNS, self.head.vocabulary)


def _row_pass_bytes(head: HeadShape, setting: Setting, rows: int) -> int:
    """Native and Triton row passes work in place; the torch path copies a block of rows."""
    if setting.in_place:
        return 0
    block = min(rows * head.vocabulary, chunked.BLOCK_ELEMENTS) * WIDE
    # scores, probabilities, the gradient of the block before; with a softcap tanh and its slope
    return block * (6 if head.softcap else 3)
