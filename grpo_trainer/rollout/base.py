"""What every rollout engine does."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

TokenIds = list[int]


class RolloutEngine(Protocol):
    """Samples one completion per prompt."""

    eos_token_ids: frozenset[int]  # a completion that ends in none of them was truncated

    def generate(self, prompt_ids: list[TokenIds]) -> list[TokenIds]:
        """Completions, each up to and including its first end-of-sequence token."""
        ...


def cut_after_eos(token_ids: TokenIds, eos_token_ids: Collection[int]) -> TokenIds:
    """``token_ids`` up to and including the first end-of-sequence token."""
    for index, token in enumerate(token_ids):
        if token in eos_token_ids:
            return token_ids[: index + 1]
    return token_ids
