"""Rewards that need no code of the user."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_THINK_THEN_ANSWER = re.compile(r"\s*<think>(?!.*<think>)(.*?)</think>.*", re.DOTALL)


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1 if the completion is one ``<think>...</think>`` block followed by the answer, else 0."""
    texts = [item if isinstance(item, str) else item[-1]["content"] for item in completions]
    return [float(_THINK_THEN_ANSWER.fullmatch(text) is not None) for text in texts]


BUILTIN_REWARDS: dict[str, Callable[..., Any]] = {"think_format_reward": think_format_reward}
