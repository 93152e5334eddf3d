"""The rows of a call, a selection of them, and the gradients of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.batch import IGNORE_INDEX, MASK_FIELDS, SamplingMask, host
from grpo_kernels.head import Head, check_mask_range, check_target_range, emptied

_NO_MASK = [None] * len(MASK_FIELDS)


@dataclass(frozen=True)
class Needs:
    """Which inputs need a gradient."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    lora_a: bool = False
    lora_b: bool = False

    @staticmethod
    def of(inputs: Sequence[Tensor | None]) -> Needs:
        """Return which of a head's inputs autograd tracks."""
        enabled = torch.is_grad_enabled()
        requested = [enabled and x is not None and x.requires_grad for x in inputs]
        return Needs(*requested)

    @property
    def of_inputs(self) -> list[bool]:
        """Which of a head's inputs need a gradient, in order."""
        return [self.hidden, self.weight, self.bias, self.lora_a, self.lora_b]

    @property
    def any(self) -> bool:
        return any(self.of_inputs)

    @property
    def of_head(self) -> bool:
        """Whether a gradient with an entry per id of the vocabulary is needed."""
        return self.weight or self.bias or self.lora_b

    @property
    def of_rows(self) -> Needs:
        """The needs other than :attr:`of_head`."""
        return replace(self, weight=False, bias=False, lora_b=False)

    @property
    def of_head_alone(self) -> Needs:
        """The needs that :attr:`of_rows` leaves out."""
        return replace(self, hidden=False, lora_a=False)


class Gradients(NamedTuple):
    """Gradients of the head's inputs; fp32, or the input dtype if that loses nothing."""

    hidden: Tensor | None = None  # (T, D)
    weight: Tensor | None = None  # (V, D)
    bias: Tensor | None = None  # (V,)
    lora_a: Tensor | None = None  # (r, D)
    lora_b: Tensor | None = None  # (V, r)

    def joined(self, others: Gradients) -> Gradients:
        """Return the sums of both, where present."""
        pairs = zip(self, others, strict=True)
        return Gradients(*(y if x is None else x if y is None else x + y for x, y in pairs))


@dataclass(frozen=True)
class Selection:
    """Some of a call's rows, or all of them."""

    index: Tensor | None = None  # (K,) int64; None: all
    total: int = 0  # rows of the call, if some are selected

    def gather(self, values: Tensor) -> Tensor:
        """Return the selected rows of (total, ...) values."""
        return values if self.index is None else values[self.index]

    def scatter(self, values: Tensor) -> Tensor:
        """Return (total, ...) values with the selected rows set; the others are 0."""
        if self.index is None:
            return values
        whole = values.new_zeros((self.total, *values.shape[1:]))
        return whole.index_copy_(0, self.index, values)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of hidden states, with their head, targets and sampling mask."""

    hidden: Tensor  # (T, D)
    head: Head
    target: Tensor  # (T,)
    sampling_mask: SamplingMask | None = None

    @property
    def count(self) -> int:
        return self.target.numel()

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The tensors that may get a gradient: the hidden states and the head's tensors."""
        return (self.hidden, *self.head.tensors)

    def with_inputs(self, hidden: Tensor, weight: Tensor, *of_head: Tensor | None) -> Rows:
        """Return the same rows with these tensors as :attr:`inputs`."""
        return replace(self, hidden=hidden, head=self.head.with_tensors(weight, *of_head))

    def without_inputs(self) -> Rows:
        """Return the same rows with empty :attr:`inputs`, for autograd's context.

        Autograd saves the inputs. Another reference would keep their memory alive under
        checkpointing and under hooks that offload saved tensors.
        """
        return replace(self, hidden=emptied(self.hidden), head=self.head.without_tensors())

    @property
    def belongings(self) -> tuple[Tensor | None, ...]:
        """The other tensors: targets, temperatures and the tensors of the mask."""
        temperature = self.head.transform.temperature
        mask = self.sampling_mask
        of_mask = _NO_MASK if mask is None else [getattr(mask, name) for name in MASK_FIELDS]
        return self.target, temperature if isinstance(temperature, Tensor) else None, *of_mask

    @property
    def local_target(self) -> Tensor:
        """(C,) target columns of :meth:`local` rows, 0 for targets on another rank."""
        shard = self.head.shard
        target = self.target
        return target if shard is None else torch.where(shard.owns(target), target, 0)

    def select(self, rows: slice | Tensor) -> Rows:
        """Return a range of rows, or the rows of an int64 index, in its order."""
        if isinstance(rows, slice) and rows == slice(0, self.count):
            return self
        mask = self.sampling_mask
        hidden = self.hidden
        return Rows(
            hidden=hidden[rows] if isinstance(rows, slice) else hidden.index_select(0, rows),
            head=self.head.rows(rows),
            target=self.target[rows],
            sampling_mask=mask.take(rows) if mask is not None else None,
        )

    def selected(self, selection: Selection) -> Rows:
        """Return the rows of a selection."""
        return self if selection.index is None else self.select(selection.index)

    def with_target(self, among: Tensor | None = None) -> Selection:
        """Select the rows with a target, ``among`` (T,) bool flags (None: among all).

        Needs one host transfer, and one more for a sampling mask.

        Raises:
            ValueError: a target or a sampling mask's id is outside the vocabulary, or a temperature
                is not positive.
        """
        self.check_values()
        if not self.count:
            return Selection()
        valid = self.target != IGNORE_INDEX
        inside = torch.where(valid, self.target, 0)
        flags = valid if among is None else valid & among
        on_host = host.sync_to_host(torch.stack([*inside.aminmax(), flags.sum()]))
        low, high, count = host.values(on_host)
        check_target_range(low, high, self.head.vocab_size)
        return selection_of(flags, count)

    def check_values(self) -> None:
        """Raise ValueError for wrong values that the host can read without a wait."""
        each = self.head.transform.temperature
        if isinstance(each, Tensor) and each.device.type == "cpu" and not bool((each > 0).all()):
            raise ValueError("temperature: expected values > 0")
        if self.sampling_mask is not None:
            check_mask_range(self.sampling_mask.max_id, self.head.vocab_size)

    def ready(self) -> Rows:
        """Return the same rows with a head that is ready for GEMMs with the hidden states."""
        return replace(self, head=self.head.to(self.hidden.dtype))

    def local(self) -> Rows:
        """Return the same rows with targets and mask ids as columns of this rank's weight.

        A target on another rank matches no column.
        """
        shard = self.head.shard
        mask = self.sampling_mask
        if shard is None:
            return self
        if mask is not None:
            mask = mask.narrow(shard.start, shard.start + shard.columns)
        return replace(self, target=self.target - shard.start, sampling_mask=mask)


def selection_of(flags: Tensor, count: int) -> Selection:
    """Select the ``count`` rows with (T,) bool flags set."""
    if count == len(flags):
        return Selection()
    return Selection(torch.argsort(~flags, stable=True)[:count], len(flags))


def selection_without_wait(flags: Tensor | None) -> Selection:
    """Select the rows with flags set, or all rows if the host would wait for their number."""
    if flags is None or not host.reading_is_free(flags):
        return Selection()
    return selection_of(flags, int(flags.sum()))


def narrowed(x: Tensor, part: slice) -> Tensor:
    """Return ``x[part]``, without an operation if that is all of ``x``."""
    return x if part == slice(0, x.shape[0]) else x[part]


def ranges(length: int, size: int) -> list[slice]:
    """Cut ``length`` into consecutive ranges of at most ``size``."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
