"""Environments: what a completion acts upon. Their public methods are tools."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset

from grpo_trainer.agents.toolbox import Toolbox, make_toolbox
from grpo_trainer.common import shortened
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import Prompt, Row, content_blocks, open_images
from grpo_trainer.rewards import RewardFunction

EnvironmentFactory: TypeAlias = Callable[[], Any] | Mapping[str, Callable[[], Any]]

_EMPTY = [{"role": "user", "content": ""}]  # a prompt that `reset` says all of
_OURS = ("reset", "get_reward")  # public methods that are no tools


def prompts_by_reset(factory: EnvironmentFactory, args: GRPOConfig) -> IterableDataset | None:
    """Return a stream of empty prompts for environments that make their own.

    None without ``max_steps``, since a stream has no end, and for environments of several kinds,
    between which a column chooses.
    """
    if isinstance(factory, Mapping) or args.max_steps < 1:
        return None
    rows = Dataset.from_list([{"prompt": _EMPTY}] * args.prompts_per_generation)
    return rows.to_iterable_dataset()


class Environments:
    """Gives each completion an environment of its own, and reuses them from batch to batch.

    ``toolboxes`` are the tools of each kind; ``rewards`` has one for each class that has
    ``get_reward``, under the name of the class.

    Args:
        factory: makes one, or a dictionary of such functions: then a row's column ``environment``
            names its own.
        tools: what all completions have beside their environment's methods.

    Raises:
        ValueError: an environment has no ``reset``, or a method that cannot be a tool.
    """

    def __init__(self, factory: EnvironmentFactory, tools: Toolbox) -> None:
        self._by_column = isinstance(factory, Mapping)
        self._factories: dict[Any, Any]
        self._factories = dict(factory) if isinstance(factory, Mapping) else {None: factory}
        self._tools = tools
        self._pools = {name: [self._make(name)] for name in self._factories}
        self.taken: list[Any] = []  # by the last batch
        firsts = [pool[0] for pool in self._pools.values()]
        self.toolboxes = [toolbox for _, toolbox in firsts]
        classes = dict.fromkeys(type(environment) for environment, _ in firsts)
        self.rewards = [_reward(one) for one in classes if hasattr(one, "get_reward")]

    def take(self, rows: Sequence[Row]) -> list[tuple[Any, Toolbox]]:
        """Return an environment for each row until the next call, and what it can call."""
        counts: Counter[str | None] = Counter()
        pairs = []
        for row in rows:
            name = row.get("environment") if self._by_column else None
            if name not in self._factories:
                expected = ", ".join(map(str, self._factories))
                raise ValueError(
                    f"environment: expected one of {expected} in that column, got {name!r}"
                )
            pool = self._pools[name]
            if counts[name] == len(pool):
                pool.append(self._make(name))
            pairs.append(pool[counts[name]])
            counts[name] += 1
        self.taken = [environment for environment, _ in pairs]
        return pairs

    def drop(self, environment: Any) -> None:
        """Do not use it again: something that was called may still work on it."""
        for pool in self._pools.values():
            pool[:] = [pair for pair in pool if pair[0] is not environment]

    def reset(self, environment: Any, row: Row) -> Prompt:
        """Return the prompt of ``row``, with what the environment shows at the beginning.

        Raises:
            ValueError: that is not text, or the prompt has no place for it.
        """
        columns = {k: v for k, v in row.items() if not (self._by_column and k == "environment")}
        shown = environment.reset(**columns)
        # the images of other rows are in their prompts already
        prompt = (row if "prompt" in row else open_images({**row, "prompt": _EMPTY}))["prompt"]
        if shown is None:
            return prompt
        kind = type(environment).__name__
        if not _is_content(shown):
            raise ValueError(
                f"{kind}.reset: expected text, a list of blocks {{'type': ...}} or None, got "
                f"{shortened(shown)}"
            )
        if isinstance(prompt, str) or not _is_content(prompt[-1].get("content")):
            raise ValueError(
                f"prompt: expected messages, the last one with a content that {kind}.reset can add "
                f"to, got {shortened(prompt)}"
            )
        content = prompt[-1]["content"]
        if isinstance(content, str) and isinstance(shown, str):
            content += shown
        else:
            content = [*content_blocks(content), *content_blocks(shown)]
        return [*prompt[:-1], prompt[-1] | {"content": content}]

    def _make(self, name: str | None) -> tuple[Any, Toolbox]:
        """Return an environment and what can be called in it."""
        make = self._factories[name]
        if not callable(make):
            raise ValueError(f"environment_factory: expected a function or a class, got {make!r}")
        environment = make()
        kind = type(environment)
        reset = getattr(kind, "reset", None)
        if not inspect.isfunction(reset) or inspect.iscoroutinefunction(reset):
            raise ValueError(
                "environment_factory: expected environments with a plain method reset(**row), got "
                f"{kind.__name__} without"
            )
        # those of the class: on the object, properties would be evaluated
        methods = [
            getattr(environment, name)
            for name, _ in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") and name not in _OURS
        ]
        own = make_toolbox(methods, f"environment_factory: {kind.__name__}")
        for name in sorted(set(own) & set(self._tools)):
            raise ValueError(
                f"environment_factory: expected other names than those of tools, got {name!r} twice"
            )
        return environment, self._tools | own


def _is_content(value: Any) -> bool:
    """Return whether a message can have it: text, or a list of blocks."""
    if not isinstance(value, list):
        return isinstance(value, str)
    return all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in value)


def _reward(kind: Any) -> RewardFunction:
    """Make the reward; None for completions in environments of another class."""

    async def later(environments: list[Any], **kwargs: Any) -> list[Any]:
        return [await one.get_reward() if type(one) is kind else None for one in environments]

    def now(environments: list[Any], **kwargs: Any) -> list[Any]:
        return [one.get_reward() if type(one) is kind else None for one in environments]

    is_async = inspect.iscoroutinefunction(kind.get_reward)
    return RewardFunction(kind.__name__, later if is_async else now, is_async)
