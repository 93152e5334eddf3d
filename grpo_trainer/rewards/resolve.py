"""From what a user names to reward functions."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from grpo_trainer.rewards.builtin import BUILTIN_REWARDS
from grpo_trainer.rewards.call import RewardFunction

RewardSource = str | Callable[..., Any]


def resolve_rewards(sources: RewardSource | Sequence[RewardSource]) -> list[RewardFunction]:
    """Reward functions from callables, built-in names and import paths ``package.module.function``.

    Two functions of one name are told apart in the log by a number: ``name``, ``name_2``.

    Raises:
        ValueError: there is none, a name is unknown or does not lead to a callable.
    """
    if isinstance(sources, str) or callable(sources):
        sources = [sources]
    if not sources:
        raise ValueError("reward_funcs: expected at least one reward function, got none")
    functions = [_load(item) if isinstance(item, str) else item for item in sources]
    seen: Counter[str] = Counter()
    rewards = []
    for function in functions:
        if not callable(function):
            raise ValueError(
                f"reward_funcs: expected callables or names, got {type(function).__name__}"
            )
        name = _name(function)
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name}_{seen[name]}"
        rewards.append(RewardFunction(name, function, _is_async(function)))
    return rewards


def _load(path: str) -> Callable[..., Any]:
    if path in BUILTIN_REWARDS:
        return BUILTIN_REWARDS[path]
    known = ", ".join(sorted(BUILTIN_REWARDS))
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ValueError(
            f"reward_funcs: expected a built-in ({known}) or an import path "
            f"package.module.function, got {path!r}"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"reward_funcs: the module of {path!r} cannot be imported: {error}"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"reward_funcs: module {module_name!r} has no {attribute!r}")
    return getattr(module, attribute)


def _name(function: Any) -> str:
    inner = getattr(function, "func", function)  # functools.partial
    return getattr(inner, "__name__", type(inner).__name__)


def _is_async(function: Any) -> bool:
    inner = getattr(function, "func", function)
    # an object is asynchronous if its class defines `async def __call__`
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
