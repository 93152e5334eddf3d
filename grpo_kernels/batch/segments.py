"""Reductions over the sequences of a packed batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
    def ids(self) -> Tensor:
        """(T,) index of each token's sequence."""
        return torch.repeat_interleave(self.lengths, output_size=self.total)

    def sum(self, values: Tensor) -> Tensor:
        """Sum (T,) values over each sequence, (B,).

        Accumulated in fp64 and in token order, so the result is the same in any batch.
        """
        sums = torch.segment_reduce(
            values.double(), "sum", lengths=self.lengths, unsafe=True, initial=0
        )
        return sums.to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """Average (T,) values over each sequence, (B,); 0 for an empty one."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def expand(self, values: Tensor) -> Tensor:
        """Give each token its sequence's value: (B,) to (T,)."""
        return values[self.ids]

    def narrow(self, start: int, stop: int) -> Segments:
        """Return the same for tokens start..stop; a cut sequence keeps what lies inside."""
        return type(self)(self.cu_seqlens.clamp(start, stop) - start, stop - start)
