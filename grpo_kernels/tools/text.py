"""Plain text for the command line."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

_MOST = 2**31 - 1  # of a count: far above what there is, and small enough to compute with
_LARGEST = 1 << 44  # bytes, likewise
_UNITS = {
    "B": 1,
    **{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40},
    **{"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
}


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, without the usage; the exit code is 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


@contextmanager
def read_in_part() -> Iterator[None]:
    """Exit quietly with code 1 if nobody reads on what is printed inside, as after ``| head``."""
    try:
        try:
            yield
        finally:  # argparse exits after a help
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        raise SystemExit(1) from None


def count(text: str) -> int:
    """Read an argument that is a whole number above 0."""
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"expected a whole number > 0; got {text!r}")
    if int(text) > _MOST:
        raise argparse.ArgumentTypeError(f"expected a number <= {_MOST}; got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Read an argument that is a finite number above 0."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number > 0; got {text!r}")


def byte_size(text: str) -> int:
    """Read an argument in bytes. The unit has to be there: 24 could be GB or GiB."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", text.strip().lower())
    unit = {name.lower(): size for name, size in _UNITS.items()}.get(match[2]) if match else None
    if match is None or unit is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"expected a size with a unit ({', '.join(_UNITS)}), such as 24GiB; got {text!r}"
        )
    size = float(match[1]) * unit
    if size > _LARGEST:
        raise argparse.ArgumentTypeError(f"expected at most {in_units(_LARGEST)}; got {text!r}")
    return int(size)


def in_units(size: int) -> str:
    """Write bytes as a person reads them."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.4g} {unit}"
    return f"{size} B"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with columns of equal width: the first to the left, the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    line = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return [line.format(*row).rstrip() for row in rows]
