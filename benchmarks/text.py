"""How numbers and tables are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{digits(seconds)} s" if seconds >= 1 else f"{digits(1000 * seconds)} ms"


def digits(value: float | None, count: int = 3) -> str:
    """Write ``count`` significant digits, never an exponent."""
    if value is None:
        return ""
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


def yes_no(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def spread(values: Sequence[float], middle: float) -> str:
    """Write a ratio, and in brackets from which to which."""
    ends = ratio(min(values)), ratio(max(values))
    return ratio(middle) if ends[0] == ends[1] else f"{ratio(middle)} ({ends[0]} to {ends[1]})"


def over_seeds(values: Sequence[float]) -> str:
    """Write a mean, and in brackets from which to which."""
    mean, *ends = (f"{x:.3f}" for x in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({' to '.join(ends)})"


def bold(text: str) -> str:
    return f"**{text}**" if text else text


def bold_least(values: Sequence[float | None], texts: Sequence[str]) -> list[str]:
    """Make those ``texts`` bold that are as the smallest value is written."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    best = texts[list(values).index(min(known))] if known else None
    return [bold(text) if text == best else text for text in texts]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write Markdown, without empty columns: numbers to the right, words to the left."""
    lines = [list(row) for row in rows]
    kept = [i for i in range(len(header)) if i == 0 or any(line[i] for line in lines)]
    rules = ["---:" if _is_of_numbers(line[i] for line in lines) else "---" for i in kept]
    body = ([line[i] for i in kept] for line in lines)
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
        for line in ([header[i] for i in kept], rules, *body)
    )


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Write columns for a terminal: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _is_of_numbers(cells: Iterable[str]) -> bool:
    """Return whether most of a column's cells start with a number."""
    starts = [cell.lstrip("*")[:1].isdigit() for cell in cells if cell]
    return 2 * sum(starts) > len(starts)
