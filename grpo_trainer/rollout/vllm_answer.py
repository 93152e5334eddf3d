"""What a vLLM server answers to a completion request, checked: a wrong row trains the wrong way."""

from __future__ import annotations

import math
from typing import Any

from grpo_trainer.rollout.base import Completions, TokenIds

_NEVER = -9999.0  # vLLM's stand-in for minus infinity, which JSON does not have


def completions_of(
    answer: Any, prompts: list[TokenIds], n: int, logprobs: int | None
) -> Completions:
    """``n`` completions per prompt in order, and the log-probabilities of their tokens.

    With ``logprobs`` above 0 it has those of the likeliest ids, too, and so what was kept of them.

    Raises:
        ValueError, KeyError, TypeError: the answer is no such thing.
    """
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(n * len(prompts))):
        raise ValueError(f"{len(choices)} choices")
    token_ids, values, kept = [], [], []
    for choice in choices:
        ids = choice["token_ids"]
        if not ids or not all(type(token) is int for token in ids):
            raise ValueError(f"token_ids {ids!r}")
        sent = prompts[choice["index"] // n]
        if choice["prompt_token_ids"] not in (None, sent):  # None: that of the choice before
            raise ValueError("the completion of another prompt")
        token_ids.append(ids)
        if logprobs is not None:
            values.append(_numbers(choice["logprobs"]["token_logprobs"], len(ids)))
        if logprobs:
            kept.append([_kept(likely) for likely in choice["logprobs"]["top_logprobs"]])
            if len(kept[-1]) != len(ids):
                raise ValueError(f"{len(kept[-1])} sets of ids for {len(ids)} tokens")
    return Completions(token_ids, None if logprobs is None else values, kept if logprobs else None)


def _kept(likely: dict[str, float]) -> TokenIds:
    """Ids come as ``token_id:7``."""
    return [int(name.partition(":")[2]) for name, value in likely.items() if value > _NEVER]


def _numbers(values: list[float | None], count: int) -> list[float]:
    if len(values) != count:
        raise ValueError(f"{len(values)} log-probabilities for {count} tokens")
    numbers = [math.nan if value is None else float(value) for value in values]  # NaN: unknown
    return [math.nan if value <= _NEVER else value for value in numbers]
