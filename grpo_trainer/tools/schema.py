"""Tools: typed Python functions, described to the model by their hints and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model can call."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]  # JSON schema, as chat templates take it
    is_async: bool


Toolbox = dict[str, Tool]  # by name


def make_toolbox(functions: Iterable[Callable[..., Any]], argument: str = "tools") -> Toolbox:
    """Return the functions as tools.

    Args:
        functions: plain or ``async`` functions or methods with type hints and a docstring that
            describes each argument, in Google's style.
        argument: whose name errors begin with.

    Raises:
        ValueError: one is no function, lacks a hint or a description, or has another one's name.
    """
    if callable(functions) or not isinstance(functions, Iterable):
        raise ValueError(f"{argument}: expected a list of functions, got {functions!r}")
    toolbox: Toolbox = {}
    for function in functions:
        tool = _make_tool(function, argument)
        if tool.name in toolbox:
            raise ValueError(f"{argument}: expected different names, got {tool.name!r} twice")
        toolbox[tool.name] = tool
    return toolbox


def schemas(toolbox: Toolbox) -> list[dict[str, Any]]:
    """Return what a chat template shows of the tools."""
    return [tool.schema for tool in toolbox.values()]


def _make_tool(function: Any, argument: str) -> Tool:
    if not inspect.isfunction(function) and not inspect.ismethod(function):
        raise ValueError(f"{argument}: expected functions or methods, got {function!r}")
    name = function.__name__
    try:
        schema = get_json_schema(function)
    except Exception as error:  # transformers raises three kinds, typing a NameError
        raise ValueError(
            f"{argument}: expected type hints for all arguments of {name!r} and a docstring with "
            f"an `Args:` section that describes them: {error}"
        ) from error
    is_async = inspect.iscoroutinefunction(function)
    return Tool(name=name, function=function, schema=schema, is_async=is_async)
