"""What a field may be: rules, most of which stand in its annotation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id

from grpo_kernels.arguments import check_name, check_number
from grpo_trainer.common import masked_text, masked_url

Rule = Callable[[str, Any], None]  # takes the name of a field and its value


def number(low: float, high: float = math.inf, *, above: bool = False, whole: bool = False) -> Rule:
    """Return the rule of a number in [low, high], with ``above`` in (low, high]; or an integer."""
    expected = f"{'an integer' if whole else 'a number'} {'>' if above else '>='} {low:g}"
    if math.isfinite(high):
        expected += f" and <= {high:g}"

    def accepts(value: float) -> bool:
        if whole and not isinstance(value, int):
            return False
        return low <= value <= high and not (above and value == low)

    return lambda name, value: check_number(name, value, expected, accepts)


def choice(names: Collection[str]) -> Rule:
    """Return the rule of a field that is one of ``names``."""
    return lambda name, value: check_name(name, value, names)


def expect(expected: str, accepts: Callable[[Any], bool]) -> Rule:
    """Return the rule of a field whose value is accepted."""

    def check(name: str, value: Any) -> None:
        if not accepts(value):
            raise ValueError(f"{name}: expected {expected}, got {value!r}")

    return check


def numbers(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a list of numbers."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}: expected a list of numbers, got {value!r}")
    for item in value:
        check_number(name, item)


def repository(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` can be the name of a repository of the hub."""
    try:
        validate_repo_id(value)
    except HFValidationError as error:
        raise ValueError(f"{name}: expected owner/name or name, got {value!r}: {error}") from error


def check_url(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is the URL of a web server."""
    try:
        parts = urlsplit(str(value))
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port
        good = False
    if not good:
        raise ValueError(f"{name}: expected http://host:port, got {masked_url(str(value))!r}")


def options(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    """Return the dictionary of an option that the command line takes as JSON; empty for None.

    Raises:
        ValueError: it is neither.
    """
    if value is None or isinstance(value, dict):
        return value or {}
    raise ValueError(
        f"{name}: expected a dictionary, as JSON {{...}}, got {masked_text(repr(value))}"
    )


def dtype_name(dtype: Any) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``, and for its name."""
    return str(dtype).removeprefix("torch.")


def loadable(name: str, value: Any) -> None:
    """Raise ValueError unless from_pretrained takes the dtype among its arguments."""
    dtype = options(name, value).get("dtype", "auto")
    if dtype is None or dtype == "auto" or isinstance(dtype, dict):  # one for each part
        return
    known = getattr(torch, dtype_name(dtype), None)
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        raise ValueError(
            f"{name}['dtype']: expected auto or a floating-point dtype of torch such as bfloat16, "
            f"got {dtype!r}"
        )


AtLeastOne = Annotated[int, number(1, whole=True)]
AtLeastTwo = Annotated[int, number(2, whole=True)]
Count = Annotated[int, number(0, whole=True)]
Port = Annotated[int, number(1, 65535, whole=True)]
NotNegative = Annotated[float, number(0)]
Positive = Annotated[float, number(0, above=True)]
Fraction = Annotated[float, number(0, 1)]
Share = Annotated[float, number(0, 1, above=True)]
Text = Annotated[str, expect("a text", lambda value: isinstance(value, str))]
Folder = Annotated[
    str, expect("a folder", lambda value: isinstance(value, str) and Path(value).is_dir())
]
Tolerance = Annotated[
    float,
    lambda name, value: check_number(name, value, "a number in (0, 1)", lambda x: 0 < x < 1),
]
Options = Annotated[dict[str, Any] | str | None, options]

# settings of vLLM in one of its modes
T = TypeVar("T")
EITHER = "colocate or server"
Colocated = Annotated[T, "colocate"]
Served = Annotated[T, "server"]
EitherMode = Annotated[T, EITHER]


@cache
def annotated_fields(config: type) -> dict[str, tuple[Any, list[Any]]]:
    """Return the type of each field, and what ``Annotated`` says of it or of a part of it."""
    kinds = get_type_hints(config)
    return {
        name: (kinds[name], _marks(annotation))
        for name, annotation in get_type_hints(config, include_extras=True).items()
    }


def _marks(annotation: Any) -> list[Any]:
    inner = [mark for part in get_args(annotation) for mark in _marks(part)]
    return [*getattr(annotation, "__metadata__", ()), *inner]
