"""From the import path of a function to the function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def load_function(path: str, argument: str) -> Callable[..., Any]:
    """What ``package.module.function`` names.

    Raises:
        ValueError: that is no such path, or leads to nothing that can be called. The message begins
            with ``argument``.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{argument}: expected package.module.function, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{argument}: the module of {path!r} cannot be imported: {error}"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"{argument}: module {module_name!r} has no {attribute!r}")
    function = getattr(module, attribute)
    if not callable(function):
        raise ValueError(
            f"{argument}: expected {path!r} to be callable, got {type(function).__name__}"
        )
    return function
