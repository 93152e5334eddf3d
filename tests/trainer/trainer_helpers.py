"""Helpers that tests import by name."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from grpo_trainer import GRPOTrainer
from grpo_trainer.rollout import Completions

CLOCK = ("_time", "_runtime", "_per_second")


class CannedEngine:
    """Completions that depend on the prompt and the row only, so that runs can be compared.

    Args:
        tokenizer: for its special tokens.
        process: the row that counts is that over all processes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, process: int = 0) -> None:
        self._eos = tokenizer.eos_token_id
        self._process = process
        self.eos_token_ids = frozenset([self._eos])

    def generate(self, prompt_ids: list[list[int]]) -> Completions:
        first = self._process * len(prompt_ids)
        ids = [self._complete(prompt, first + row) for row, prompt in enumerate(prompt_ids)]
        return Completions(ids)

    def _complete(self, prompt: list[int], row: int) -> list[int]:
        length = 1 + (sum(prompt) + row) % 4
        ids = [3 + (prompt[0] + 2 * row + 5 * i) % 10 for i in range(length)]
        return ids if length == 4 else [*ids, self._eos]


def parameters(model: torch.nn.Module) -> torch.Tensor:
    """All parameters, flat, as a copy."""
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def logged(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """Everything the run logged that does not depend on the clock."""
    return [
        {name: value for name, value in row.items() if not name.endswith(CLOCK)}
        for row in trainer.state.log_history
        if "train_runtime" not in row
    ]
