"""Rewards on format and length. Those with settings are made by a ``get_...`` function."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

Reward = Callable[..., list[float]]
OptionalReward = Callable[..., list[float | None]]

_THINK_THEN_ANSWER = re.compile(r"<think>(?!.*<think>).*?</think>.*", re.DOTALL)


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """Return the text of a completion: itself, or that of its last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return 1 for one ``<think>...</think>`` block and then the answer, else 0."""
    return [float(_THINK_THEN_ANSWER.fullmatch(_whole(item)) is not None) for item in completions]


def _whole(completion: str | list[dict[str, Any]]) -> str:
    """Put a thought that was told from the answer back in front of it."""
    text = text_of(completion)
    thought = None if isinstance(completion, str) else completion[-1].get("reasoning_content")
    return f"<think>{thought}</think>{text}" if thought and text else text


def with_settings(reward: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Return a reward function with its settings, which has its name and can be pickled."""
    made = functools.partial(reward, **settings)
    made.__name__ = reward.__name__  # type: ignore[attr-defined]  # for logs
    return made


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Reward:
    """Return a reward that falls from 0 to -1 over the last tokens before a length limit.

    Equation 13 of DAPO, arXiv:2503.14476: 0 up to ``max_completion_len - soft_punish_cache``
    tokens, then linearly down to -1 at ``max_completion_len``, and -1 beyond.

    Raises:
        ValueError: ``soft_punish_cache`` is not in [0, max_completion_len].
    """
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise ValueError(
            "soft_punish_cache: expected a number between 0 and max_completion_len = "
            f"{max_completion_len!r}, got {soft_punish_cache!r}"
        )
    return with_settings(
        soft_overlong_punishment_reward, limit=max_completion_len, cache=soft_punish_cache
    )


def soft_overlong_punishment_reward(
    completion_ids: list[list[int]], *, limit: int, cache: int, **kwargs: Any
) -> list[float]:
    """Return what :func:`get_soft_overlong_punishment` says, for its settings."""

    def punishment(length: int) -> float:
        if length <= limit - cache:
            return 0.0
        return -1.0 if length > limit else (limit - cache - length) / cache

    return [punishment(len(ids)) for ids in completion_ids]


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Reward:
    """Return a reward of ``max_penalty`` times the share of n-grams that occurred before.

    Appendix C.2 of arXiv:2502.03373, on n-grams of tokens. A completion shorter than an n-gram
    gets 0.

    Raises:
        ValueError: ``ngram_size`` is below 1, or ``max_penalty`` above 0.
    """
    if ngram_size < 1:
        raise ValueError(f"ngram_size: expected an integer >= 1, got {ngram_size!r}")
    if max_penalty > 0:
        raise ValueError(f"max_penalty: expected a number <= 0, got {max_penalty!r}")

    return with_settings(repetition_penalty_reward, size=ngram_size, most=max_penalty)


def repetition_penalty_reward(
    completion_ids: list[list[int]], *, size: int, most: float, **kwargs: Any
) -> list[float]:
    """Return what :func:`get_repetition_penalty_reward` says, for its settings."""

    def penalty(ids: list[int]) -> float:
        total = len(ids) - size + 1
        if total < 1:
            return 0.0
        different = {tuple(ids[start : start + size]) for start in range(total)}
        return (total - len(different)) / total * most

    return [penalty(ids) for ids in completion_ids]
