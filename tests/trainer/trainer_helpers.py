"""Helpers that tests import by name."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase


class CannedEngine:
    """Completions that depend on the prompt and the row only, so that runs can be compared.

    Args:
        tokenizer: for its special tokens.
        first_row: position of this process's first row in the generation batch.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, first_row: int = 0) -> None:
        self._eos = tokenizer.eos_token_id
        self._first_row = first_row
        self.eos_token_ids = frozenset([self._eos])

    def generate(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        return [self._complete(ids, self._first_row + row) for row, ids in enumerate(prompt_ids)]

    def _complete(self, prompt: list[int], row: int) -> list[int]:
        length = 1 + (sum(prompt) + row) % 4
        ids = [3 + (prompt[0] + 2 * row + 5 * i) % 10 for i in range(length)]
        return ids if length == 4 else [*ids, self._eos]


def parameters(model: torch.nn.Module) -> torch.Tensor:
    """All parameters, flat, as a copy."""
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
