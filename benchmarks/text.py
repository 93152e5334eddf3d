"""How numbers and tables are written."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

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


def ratio(value: float) -> str:
    return f"{value:.2f}"


def mib(size: float) -> str:
    return f"{size / 2**20:.0f}"


def percent(share: float) -> str:
    return digits(100 * share, 2)


def error(value: float | None) -> str:
    """Write one digit: 9e-7."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def spread(values: Sequence[float], middle: float) -> str:
    """Write a ratio, and in brackets from which to which."""
    ends = ratio(min(values)), ratio(max(values))
    return ratio(middle) if ends[0] == ends[1] else f"{ratio(middle)} ({ends[0]} to {ends[1]})"


def bold(text: str) -> str:
    return f"**{text}**" if text else text


def bold_least(values: Sequence[float | None], texts: Sequence[str]) -> list[str]:
    """Make those ``texts`` bold that are as the smallest value is written, but for brackets."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    written = [text.partition(" (")[0] for text in texts]
    best = written[list(values).index(min(known))] if known else None
    return [bold(x) if short == best else x for x, short in zip(texts, written, strict=True)]


def markdown(lines: Lines) -> str:
    """Write a table without empty columns: numbers to the right, words to the left."""
    header, *body = _filled(lines)
    columns = list(zip(*body, strict=True)) or [()] * len(header)
    rules = ["---:" if _is_of_numbers(cells) else "---" for cells in columns]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
        for line in (header, rules, *body)
    )


def plain(lines: Lines) -> str:
    """Write a table for a terminal: numbers to the right, words to the left."""
    rows = [[cell.replace("**", "") for cell in line] for line in _filled(lines)]
    columns = []
    for title, *cells in zip(*rows, strict=True):
        align = str.rjust if _is_of_numbers(cells) else str.ljust
        columns.append([align(cell, max(map(len, (title, *cells)))) for cell in (title, *cells)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _filled(lines: Lines) -> Lines:
    kept = [i for i in range(len(lines[0])) if i == 0 or any(line[i] for line in lines[1:])]
    return [[line[i] for i in kept] for line in lines]


def _is_of_numbers(cells: Iterable[str]) -> bool:
    """Return whether most of a column's cells start with a number."""
    starts = [cell.lstrip("*x ")[:1].isdigit() for cell in cells if cell]
    return 2 * sum(starts) > len(starts)


def filled(words: str, width: int) -> str:
    """Break the lines of text that are longer than ``width``; tables have theirs."""
    lines = words.split("\n")
    return "\n".join(line if "  " in line else textwrap.fill(line, width) for line in lines)
