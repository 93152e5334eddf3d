"""Environments: what a completion acts upon. Their public methods are tools."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset

from grpo_trainer.agents.toolbox import Toolbox, make_toolbox
from grpo_trainer.common import shortened
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import Prompt, Row, content_blocks, with_images
from grpo_trainer.rewards import RewardFunction

EnvironmentFactory: TypeAlias = Callable[[], Any] | Mapping[str, Callable[[], Any]]

_EMPTY = [{"role": "user", "content": ""}]  # a prompt that `reset` says all of
_OURS = ("reset", "get_reward")  # public methods that are no tools


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What is known of the environments that a factory makes."""

    make: Callable[[], Any]
    toolbox: Toolbox  # whose functions belong to `probe`
    probe: Any


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

    Args:
        factory: makes one, or a dictionary of such functions: then a row's column ``environment``
            names its own.
        tools: what all completions have beside their environment's methods.

    Raises:
        ValueError: an environment has no ``reset``, or a method that cannot be a tool.
    """

    def __init__(self, factory: EnvironmentFactory, tools: Toolbox) -> None:
        self._by_column = isinstance(factory, Mapping)
        factories = factory if isinstance(factory, Mapping) else {None: factory}
        self._kinds = {name: _probe(make, tools) for name, make in factories.items()}
        self._made = {name: [kind.probe] for name, kind in self._kinds.items()}
        self.taken: list[Any] = []  # by the last batch

    @property
    def toolboxes(self) -> list[Toolbox]:
        """The tools of each kind."""
        return [kind.toolbox for kind in self._kinds.values()]

    @property
    def rewards(self) -> list[RewardFunction]:
        """One for each class that has ``get_reward``, under the name of the class."""
        classes = dict.fromkeys(type(kind.probe) for kind in self._kinds.values())
        return [_reward(one) for one in classes if hasattr(one, "get_reward")]

    def take(self, rows: Sequence[Row]) -> list[tuple[Any, Toolbox]]:
        """Return an environment for each row until the next call, and what it can call."""
        used: Counter[str | None] = Counter()
        taken = []
        for row in rows:
            name = self._name(row)
            kind, made = self._kinds[name], self._made[name]
            if used[name] == len(made):
                made.append(kind.make())
            environment = made[used[name]]
            used[name] += 1
            taken.append((environment, _bound(kind, environment)))
        self.taken = [environment for environment, _ in taken]
        return taken

    def drop(self, environment: Any) -> None:
        """Do not use it again: something that was called may still work on it."""
        for made in self._made.values():
            made[:] = [one for one in made if one is not environment]

    def reset(self, environment: Any, row: Row) -> Prompt:
        """Return the prompt of ``row``, with what the environment shows at the beginning.

        Raises:
            ValueError: that is not text, or the prompt has no place for it.
        """
        columns = {k: v for k, v in row.items() if not (self._by_column and k == "environment")}
        shown = environment.reset(**columns)
        # the images of other rows are in their prompts already
        prompt = row["prompt"] if "prompt" in row else with_images({**row, "prompt": _EMPTY})
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
        last = prompt[-1]
        return [*prompt[:-1], last | {"content": _joined(last["content"], shown)}]

    def _name(self, row: Row) -> str | None:
        name = row.get("environment") if self._by_column else None
        if name not in self._kinds:
            known = ", ".join(map(str, self._kinds))
            raise ValueError(f"environment: expected one of {known} in that column, got {name!r}")
        return name


def _is_content(value: Any) -> bool:
    """Return whether a message can have it: text, or a list of blocks."""
    if not isinstance(value, list):
        return isinstance(value, str)
    return all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in value)


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    return [*content_blocks(first), *content_blocks(second)]


def _probe(make: Any, tools: Toolbox) -> _Kind:
    if not callable(make):
        raise ValueError(f"environment_factory: expected a function or a class, got {make!r}")
    probe = make()
    kind = type(probe)
    if not inspect.isfunction(getattr(kind, "reset", None)) or inspect.iscoroutinefunction(
        kind.reset
    ):
        raise ValueError(
            "environment_factory: expected environments with a plain method reset(**row), got "
            f"{kind.__name__} without"
        )
    # those of the class: on the object, properties would be evaluated
    methods = [
        getattr(probe, name)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in _OURS
    ]
    own = make_toolbox(methods, f"environment_factory: {kind.__name__}")
    both = sorted(set(own) & set(tools))
    if both:
        raise ValueError(
            f"environment_factory: expected other names than those of tools, got {both[0]!r} twice"
        )
    return _Kind(make=make, toolbox=tools | own, probe=probe)


def _bound(kind: _Kind, environment: Any) -> Toolbox:
    """Return the kind's tools, those of the environment being its own."""
    own = {
        name: replace(tool, function=getattr(environment, name))
        for name, tool in kind.toolbox.items()
        if getattr(tool.function, "__self__", None) is kind.probe
    }
    return kind.toolbox | own


def _reward(kind: Any) -> RewardFunction:
    """Make the reward; None for completions in environments of another class."""
    if inspect.iscoroutinefunction(kind.get_reward):

        async def later(environments: list[Any], **kwargs: Any) -> list[Any]:
            return [await one.get_reward() if type(one) is kind else None for one in environments]

        return RewardFunction(kind.__name__, later, is_async=True)

    def now(environments: list[Any], **kwargs: Any) -> list[Any]:
        return [one.get_reward() if type(one) is kind else None for one in environments]

    return RewardFunction(kind.__name__, now)
