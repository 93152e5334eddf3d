"""The task: write a number's digits backwards."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

DIGITS = 3
EVAL_PROMPTS = 128

_PARTIAL, _LENGTH = 0.6, 0.4  # shares of the reward: digits in place, right length


def digits_reversal_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Return 0.6 times the share of correct digits, plus 0.4 for ending after the last digit.

    A correct answer gets 1, random tokens about 0.07.
    """
    return [_score(text, right) for text, right in zip(completions, answer, strict=True)]


def _score(text: str, right: str) -> float:
    # an answer that the length limit cut off is longer than `right`
    hits = sum(a == b for a, b in zip(text, right, strict=False))
    return _PARTIAL * hits / len(right) + _LENGTH * (len(text) == len(right))


def write_dataset(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``eval.jsonl``: all numbers with DIGITS digits, split at random."""
    numbers = ["".join(digits) for digits in itertools.product("0123456789", repeat=DIGITS)]
    random.Random(seed).shuffle(numbers)
    parts = {"eval": numbers[:EVAL_PROMPTS], "train": numbers[EVAL_PROMPTS:]}
    for name, part in parts.items():
        rows = [{"prompt": f"{number}=", "answer": number[::-1]} for number in part]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder / "train.jsonl", folder / "eval.jsonl"
