"""Reductions over the sequences of a packed batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.batch.sequence_group import SequenceGroup


@dataclass(frozen=True)
class Segments:
    """Sums and means over sequences, in plain torch; a backend may bring its own."""

    cu_seqlens: Tensor  # (B + 1,) int64, from 0 to T
    total: int  # T

    @property
    def lengths(self) -> Tensor:
        """(B,) tokens of each sequence."""
        return self.cu_seqlens.diff()

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.total

    @property
    def ids(self) -> Tensor:
        """(T,) index of each token's sequence."""
        return torch.repeat_interleave(self.cu_seqlens.diff(), output_size=self.total)

    def sum(self, values: Tensor) -> Tensor:
        """Sum (T,) values over each sequence, (B,).

        Accumulated in fp64 and in token order, so the result is the same in any batch.
        """
        return self._wide_sum(values).to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """Average (T,) values over each sequence, (B,); 0 for an empty one."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def sum_all(self, values: Tensor) -> Tensor:
        """Sum (T,) values over all sequences, ()."""
        return values.sum()

    def expand(self, values: Tensor) -> Tensor:
        """Give each token its sequence's value: (B,) to (T,)."""
        return values[self.ids]

    def narrow(self, start: int, stop: int) -> Segments:
        """Return the same for tokens start..stop; a cut sequence keeps what lies inside."""
        return type(self)(self.cu_seqlens.clamp(start, stop) - start, stop - start)

    def _wide_sum(self, values: Tensor) -> Tensor:
        lengths = self.cu_seqlens.diff()
        return torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True, initial=0)


@dataclass(frozen=True)
class SharedSegments(Segments):
    """The same for sequences whose tokens lie on several ranks: T of them here.

    Sums, means and lengths are those of whole sequences. Sums are collectives, and so are their
    derivatives.
    """

    across: SequenceGroup

    @property
    def lengths(self) -> Tensor:
        return self.across.on_device[0]

    @property
    def num_tokens(self) -> int:
        return self.across.num_tokens

    def sum(self, values: Tensor) -> Tensor:
        return self.across.sum(self._wide_sum(values)).to(values.dtype)

    def sum_all(self, values: Tensor) -> Tensor:
        total = values.sum(dtype=torch.float64).reshape(1)
        return self.across.sum(total).reshape(()).to(values.dtype)

    def narrow(self, start: int, stop: int) -> Segments:
        raise ValueError("sequence_group: expected None to cut a batch into ranges, got one")
