"""Modules of the user's, and the functions in them that an import path names."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_trainer.common.text import hint


def load_module(name: str, argument: str) -> ModuleType:
    """Import the module ``name``.

    Raises:
        ValueError: it cannot be imported, whatever its own code raises. The message begins with
            ``argument``.
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # it runs the user's code
        frame = traceback.extract_tb(error.__traceback__)[-1]
        file = Path(frame.filename)  # none in the import machinery, as for a missing module
        where = f" ({file.name}, line {frame.lineno})" if file.is_file() else ""
        raise ValueError(
            f"{argument}: module {name!r} cannot be imported: {type(error).__name__}: "
            f"{error}{where}"
        ) from error


def load_function(path: str, argument: str) -> Callable[..., Any]:
    """Import what ``package.module.function`` names.

    Raises:
        ValueError: that is no such path, or leads to nothing that can be called. The message begins
            with ``argument``.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name or path.startswith("."):
        raise ValueError(f"{argument}: expected package.module.function, got {path!r}")
    module = load_module(module_name, argument)
    if not hasattr(module, attribute):
        meant = hint(attribute, list(vars(module)))
        raise ValueError(f"{argument}: module {module_name!r} has no {attribute!r}{meant}")
    function = getattr(module, attribute)
    if not callable(function):
        raise ValueError(
            f"{argument}: expected {path!r} to be callable, got {type(function).__name__}"
        )
    return function
