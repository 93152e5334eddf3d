"""Checks of settings: one clear error that names the setting."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any


def check_name(argument: str, value: object, known: Collection[Any]) -> None:
    """Raise ValueError, listing the known names, unless ``value`` is one of them."""
    if value not in tuple(known):  # which any value can be asked for, unlike a dictionary
        names = ", ".join(sorted(map(str, known)))
        raise ValueError(f"{argument}: expected one of {names}; got {value!r}")


def check_number(
    name: str,
    value: Any,
    expected: str = "a finite number",
    accepts: Callable[[float], bool] = lambda value: True,
    *,
    optional: bool = False,
) -> None:
    """Raise ValueError unless ``value`` is a finite number that is accepted, or None if optional.

    ``expected`` says in words what is accepted.
    """
    if value is None and optional:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    finite = number and abs(value) <= sys.float_info.max  # an int may be larger
    if not finite or not accepts(value):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a finite number above 0."""
    check_number(name, value, "a finite number > 0", lambda x: x > 0)


def check_not_negative(name: str, value: Any, *, optional: bool = False) -> None:
    """Raise ValueError unless ``value`` is a finite number of at least 0."""
    check_number(name, value, "a finite number >= 0", lambda x: x >= 0, optional=optional)
