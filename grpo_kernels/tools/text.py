"""Plain text for the command line."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

_MOST = 2**31 - 1  # of a count: far above what there is, and small enough to compute with
_LARGEST = 1 << 44  # bytes, likewise
_UNITS = {
    "b": 1,
    **{f"{letter}ib": 1 << (10 * power) for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)},
}


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, without the usage; the exit code is 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)


def count(text: str) -> int:
    """Read an argument that is a whole number above 0."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number > 0; got {text!r}")
    if int(text) > _MOST:
        raise argparse.ArgumentTypeError(f"expected a number <= {_MOST}; got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Read an argument that is a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"expected a number > 0; got {text!r}")
    return number


def byte_size(text: str) -> int:
    """Read an argument in bytes. The unit has to be there: 24 could be GB or GiB."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"expected a size with a unit (B, KiB, MiB, GiB, TiB, kB, MB, GB, TB), such as 24GiB; "
            f"got {text!r}"
        )
    size = float(match[1]) * _UNITS[match[2]]
    if size > _LARGEST:
        raise argparse.ArgumentTypeError(f"expected at most {in_units(_LARGEST)}; got {text!r}")
    return int(size)


def in_units(size: int) -> str:
    """Write bytes as a person reads them."""
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << exponent:
            return f"{size / (1 << exponent):.4g} {unit}"
    return f"{size} B"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with columns of equal width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def duration(seconds: float) -> str:
    """Return the seconds in a form for people."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
