"""What a vLLM server answers to a completion request, checked: a wrong row trains the wrong way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from grpo_trainer.rollout.base import Completions, TokenIds

_NEVER = -9999.0  # vLLM's stand-in for minus infinity, which JSON does not have
_ROUNDING = 1e-2  # by so much a log-probability may be above 0


def completions_of(
    choices: Sequence[dict[str, Any]],
    prompts: Sequence[TokenIds | None],
    n: int,
    max_tokens: int,
    logprobs: int | None,
    vocab_size: int | None,
) -> tuple[list[TokenIds], Completions]:
    """Return the prompts' ids, and ``n`` completions per prompt in order with log-probabilities.

    The other arguments are what was asked for; a prompt is None if only the server knows its ids.
    With ``logprobs`` above 0 the choices have those of the likeliest ids, too, and so the sampling
    mask. ``vocab_size`` is None where it is unknown.

    Raises:
        ValueError, KeyError, TypeError: the answer is no such thing.
    """
    choices = sorted(choices, key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(n * len(prompts))):
        raise ValueError(f"{len(choices)} choices")
    prompt_ids = [  # those that were sent, or those that the server says it has
        _checked_ids(first["prompt_token_ids"], vocab_size) if prompt is None else prompt
        for prompt, first in zip(prompts, choices[::n], strict=True)
    ]
    token_ids, values, mask = [], [], []
    for choice in choices:
        ids = _checked_ids(choice["token_ids"], vocab_size)
        if not 0 < len(ids) <= max_tokens:
            raise ValueError(f"{len(ids)} tokens, expected 1 to max_tokens = {max_tokens}")
        own = prompt_ids[choice["index"] // n]
        if choice["prompt_token_ids"] not in (None, own):  # None: that of the choice before
            raise ValueError("the completion of another prompt")
        token_ids.append(ids)
        if logprobs is not None:
            values.append(_numbers(choice["logprobs"]["token_logprobs"], len(ids)))
        if logprobs:
            likeliest = choice["logprobs"]["top_logprobs"]
            mask.append([_checked_ids(_left(each), vocab_size) for each in likeliest])
            if len(mask[-1]) != len(ids):
                raise ValueError(f"{len(mask[-1])} sets of ids for {len(ids)} tokens")
    columns = (None if logprobs is None else values, mask if logprobs else None)
    return prompt_ids, Completions(token_ids, *columns)


def _checked_ids(ids: TokenIds, vocab_size: int | None) -> TokenIds:
    end = math.inf if vocab_size is None else vocab_size
    wrong = [token for token in ids if type(token) is not int or not 0 <= token < end]
    if wrong:
        raise ValueError(f"token id {wrong[0]!r}, expected 0 <= id < {end}")
    return ids


def _left(likely: dict[str, float]) -> TokenIds:
    """Return the ids, which come as ``token_id:7``."""
    return [int(name.partition(":")[2]) for name, value in likely.items() if value > _NEVER]


def _numbers(values: list[float | None], count: int) -> list[float]:
    if len(values) != count:
        raise ValueError(f"{len(values)} log-probabilities for {count} tokens")
    numbers = [math.nan if value is None else float(value) for value in values]  # NaN: unknown
    if any(value > _ROUNDING for value in numbers):
        raise ValueError(f"log-probability {max(numbers)}, expected at most 0")
    return [math.nan if value <= _NEVER else value for value in numbers]
