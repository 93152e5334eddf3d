"""Argument checks: errors name the argument, what was expected, and what was passed."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection
from dataclasses import field, fields
from numbers import Real
from typing import Any

import torch
from torch import Tensor

# (expected, accepts) for check_number
POSITIVE = ("a finite number > 0", lambda x: x > 0)
NOT_NEGATIVE = ("a finite number >= 0", lambda x: x >= 0)


def hint(name: object, known: Collection[Any]) -> str:
    """Return a hint at the ``known`` name that was probably meant; empty if none is close."""
    close = difflib.get_close_matches(str(name), [str(each) for each in known], n=1)
    return f" (is it {close[0]}?)" if close else ""


def check_name(argument: str, value: object, known: Collection[Any]) -> None:
    """Raise ValueError, listing the known names, unless ``value`` is one."""
    if value not in tuple(known):  # unlike a dictionary, a tuple accepts unhashable values
        names = ", ".join(sorted(map(str, known)))
        raise ValueError(f"{argument}: expected one of {names}; got {value!r}{hint(value, known)}")


def check_number(
    name: str,
    value: Any,
    expected: str = "a finite number",
    accepts: Callable[[float], bool] = lambda value: True,
) -> None:
    """Raise ValueError unless ``value`` is a finite number that ``accepts`` allows."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    finite = number and abs(value) <= sys.float_info.max  # an int may be larger
    if not finite or not accepts(value):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def kind_of(value: Any) -> Any:
    """Return how a message describes ``value``: the shape of a tensor, else its type."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def check_like(name: str, value: Tensor, like: Tensor, of: str) -> None:
    """Raise ValueError unless ``value`` has the shape and device of ``like``, named ``of``."""
    if not isinstance(value, Tensor) or value.shape != like.shape:
        raise ValueError(
            f"{name}: expected the shape of {of} {tuple(like.shape)}, got {kind_of(value)}"
        )
    check_device(name, value, like.device, of)


def check_device(name: str, value: Tensor, device: torch.device, of: str = "hidden") -> None:
    """Raise ValueError unless ``value`` is on ``device``, the device of the argument ``of``."""
    if value.device != device:
        raise ValueError(f"{name}: expected device {device} (of {of}), got {value.device}")


def check_integers(name: str, value: Any, expected: str, least: int = 0) -> None:
    """Raise ValueError unless ``value`` is an int32 or int64 vector of length ``least`` or more."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.numel() < least:
        raise ValueError(f"{name}: expected a {expected}, got {kind_of(value)}")
    if value.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: expected int32 or int64, got {value.dtype}")


def number(default: float | None, *expected: Any, optional: bool = False) -> Any:
    """Return a dataclass field for a number that is checked; ``optional``: or None."""
    return field(default=default, metadata={"check": (check_number, expected, optional)})


def choice(default: Any, known: Collection[Any], *, optional: bool = False) -> Any:
    """Return a dataclass field for one of the ``known`` values; ``optional``: or None."""
    return field(default=default, metadata={"check": (check_name, (known,), optional)})


def check_fields(settings: Any) -> None:
    """Check all fields that are a :func:`number` or a :func:`choice`; raise ValueError."""
    for item in fields(settings):
        if "check" in item.metadata:
            check, expected, optional = item.metadata["check"]
            value = getattr(settings, item.name)
            if value is not None or not optional:
                check(item.name, value, *expected)
