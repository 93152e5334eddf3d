"""Calling reward functions: asynchronous ones together, every answer checked."""

from __future__ import annotations

import asyncio
import math
import numbers
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RewardFunction:
    """A reward function under the name that it is logged with.

    It is called with the keyword arguments ``prompts``, ``completions``, ``completion_ids``, one
    list per further dataset column and ``trainer_state``, and returns one number per completion, or
    None where it does not apply.
    """

    name: str
    function: Callable[..., Any]
    is_async: bool = False


def score(rewards: list[RewardFunction], count: int, arguments: dict[str, Any]) -> Tensor:
    """Rewards (count, F) fp32 on the CPU; NaN where a function returned None.

    Raises:
        ValueError: a function returned the wrong number or type of values.
        RuntimeError: a function raised; the message names it.
    """
    awaited = [reward for reward in rewards if reward.is_async]
    answers = dict(zip(awaited, _run_async(awaited, arguments), strict=True))
    for reward in rewards:
        if not reward.is_async:
            answers[reward] = _call(reward, arguments)
    columns = [_checked(reward.name, answers[reward], count) for reward in rewards]
    return torch.tensor(columns, dtype=torch.float32).T


def _call(reward: RewardFunction, arguments: dict[str, Any]) -> Any:
    try:
        return reward.function(**arguments)
    except Exception as error:
        raise _named(reward, error) from error


def _run_async(rewards: list[RewardFunction], arguments: dict[str, Any]) -> list[Any]:
    if not rewards:
        return []

    async def call(reward: RewardFunction) -> Any:
        try:
            return await reward.function(**arguments)
        except Exception as error:
            raise _named(reward, error) from error

    async def call_all() -> list[Any]:
        return await asyncio.gather(*(call(reward) for reward in rewards))

    # a thread of its own, since the caller (a notebook) may already run an event loop
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(lambda: asyncio.run(call_all())).result()


def _named(reward: RewardFunction, error: Exception) -> RuntimeError:
    return RuntimeError(f"reward function {reward.name!r} raised {type(error).__name__}: {error}")


def _checked(name: str, values: Any, count: int) -> list[float]:
    if isinstance(values, torch.Tensor) or hasattr(values, "tolist"):  # also numpy
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise ValueError(
            f"reward function {name!r}: expected a list of {count} numbers, "
            f"got {type(values).__name__}"
        )
    if len(values) != count:
        raise ValueError(
            f"reward function {name!r}: expected {count} rewards, one per completion, "
            f"got {len(values)}"
        )
    return [_number(name, value) for value in values]


def _number(name: str, value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise ValueError(
            f"reward function {name!r}: expected numbers or None, got {type(value).__name__}"
        )
    return float(value)
