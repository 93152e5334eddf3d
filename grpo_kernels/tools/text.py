"""Arguments and text of the command line."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

_LARGEST_COUNT = 2**31 - 1  # far above real values, and small enough to compute with
_LARGEST_SIZE = 1 << 44  # bytes, for the same reason
_UNITS = {
    "B": 1,
    **{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40},
    **{"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
}


class OneLineParser(argparse.ArgumentParser):
    """A parser that prints errors as one line on stderr, without usage, and exits with code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


@contextmanager
def read_in_part() -> Iterator[None]:
    """Exit silently with code 1 if the reader of stdout is gone, as after ``| head``."""
    try:
        try:
            yield
        finally:  # argparse exits after --help
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        raise SystemExit(1) from None


def count(text: str) -> int:
    """Read an argument that is a whole number above 0."""
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"expected a whole number > 0; got {text!r}")
    if int(text) > _LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"expected a number <= {_LARGEST_COUNT}; got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Read an argument that is a finite number above 0."""
    return _number(text, "> 0", most=sys.float_info.max)


def share(text: str) -> float:
    """Read an argument that is a fraction in (0, 1]."""
    return _number(text, "> 0 and <= 1", most=1)


def _number(text: str, expected: str, most: float) -> float:
    with suppress(ValueError):
        if 0 < float(text) <= most:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number {expected}; got {text!r}")


def byte_size(text: str) -> int:
    """Read an argument in bytes. The unit is required: 24 could be GB or GiB."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", text.strip().lower())
    unit = {name.lower(): size for name, size in _UNITS.items()}.get(match[2]) if match else None
    if match is None or unit is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"expected a size with a unit ({', '.join(_UNITS)}), such as 24GiB; got {text!r}"
        )
    size = float(match[1]) * unit
    if size > _LARGEST_SIZE:
        raise argparse.ArgumentTypeError(
            f"expected at most {in_units(_LARGEST_SIZE)}; got {text!r}"
        )
    return int(size)


def in_units(size: int) -> str:
    """Format a number of bytes with a binary unit."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.4g} {unit}"
    return f"{size} B"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column is left-aligned, the others right-aligned."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = f"{{:<{first}}}" + "".join(f"  {{:>{width}}}" for width in others)
    return [line.format(*row).rstrip() for row in rows]
