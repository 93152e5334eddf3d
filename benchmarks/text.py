"""How numbers and tables are written."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from statistics import fmean, median

Lines = list[list[str]]  # of cells; the first line is the header


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{digits(seconds)} s" if seconds >= 1 else f"{digits(1000 * seconds)} ms"


def digits(value: float, count: int = 3) -> str:
    """Write ``count`` significant digits, never an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = count - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(places, 0)}f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def mib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f}"


def error(value: float | None) -> str:
    """Write one digit: 9e-7."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def percent(share: float) -> str:
    """Write one digit, never an exponent: 0.00002 %."""
    return f"{digits(100 * share, 1)} %"


def spread(values: Sequence[float]) -> str:
    """Write the median of ratios, and in brackets from which to which."""
    if not values:
        return ""
    middle, *ends = map(ratio, (median(values), min(values), max(values)))
    return middle if ends[0] == ends[1] else f"{middle} ({ends[0]} to {ends[1]})"


def mean_and_spread(values: Sequence[float]) -> str:
    """Write the mean, and in brackets from which to which."""
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def bold(text: str) -> str:
    return f"**{text}**" if text else text


def bold_least(texts: Sequence[str], counts: Sequence[bool] | None = None) -> list[str]:
    """Make the smallest numbers bold, but for what stands in brackets; of those that count."""
    written = [text.partition(" (")[0] for text in texts]
    known = {}
    for text, count in zip(written, counts or [True] * len(texts), strict=True):
        with suppress(ValueError):
            if count and not math.isnan(float(text)):
                known[text] = float(text)
    best = min(known, key=lambda text: known[text], default=None)
    return [bold(x) if short == best else x for x, short in zip(texts, written, strict=True)]


def markdown(lines: Lines) -> str:
    """Write a table without empty columns: numbers to the right, words to the left."""
    columns = _columns(lines)
    for column in columns:
        column.insert(1, "---:" if _is_of_numbers(column[1:]) else "---")
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
        for line in zip(*columns, strict=True)
    )


def plain(lines: Lines) -> str:
    """Write a table for a terminal: numbers to the right, words to the left."""
    columns = []
    for column in _columns(lines):
        cells = [cell.replace("**", "") for cell in column]
        align = str.rjust if _is_of_numbers(cells[1:]) else str.ljust
        columns.append([align(cell, max(map(len, cells))) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _columns(lines: Lines) -> Lines:
    """Return the first column and those that are not empty."""
    first, *others = map(list, zip(*lines, strict=True))
    return [first, *(column for column in others if any(column[1:]))]


def _is_of_numbers(cells: Iterable[str]) -> bool:
    """Return whether most of a column's cells start with a number."""
    starts = [cell.lstrip("*x ")[:1].isdigit() for cell in cells if cell]
    return 2 * sum(starts) > len(starts)


def filled(words: str, width: int) -> str:
    """Break the lines of text that are longer than ``width``; tables have theirs."""
    lines = words.split("\n")
    return "\n".join(line if "  " in line else textwrap.fill(line, width) for line in lines)
