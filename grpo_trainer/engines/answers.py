"""What an engine answers: completions, as token ids and what it knows of each of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

TokenIds = list[int]


class Completions(NamedTuple):
    """One completion per prompt, each up to and including its first end-of-sequence token."""

    token_ids: list[TokenIds]
    # of each token, under the distribution it was drawn from; None: the engine does not say
    logprobs: list[list[float]] | None = None
    # of each token, the ids that the sampling filters left to choose from; None: not asked for
    sampling_mask: list[list[TokenIds]] | None = None

    def rows(self) -> Iterator[tuple[TokenIds, list[float] | None, list[TokenIds] | None]]:
        """Return the three of each completion."""
        others = self.logprobs or repeat(None), self.sampling_mask or repeat(None)
        return zip(self.token_ids, *others, strict=False)
