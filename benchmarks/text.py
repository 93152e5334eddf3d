"""How numbers and tables are written."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from statistics import fmean, median
from typing import Any

from pandas import DataFrame


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
    """Write one digit, never an exponent: 0.00002%."""
    return f"{digits(100 * share, 1)}%"


def listed(names: Sequence[str]) -> str:
    """Write a list as English does: a, b and c."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def percents(shares: Sequence[float]) -> str:
    """Write the smallest and the largest, 62% to 81%, or one number if they are equal."""
    least, most = (f"{100 * share:.0f}%" for share in (min(shares), max(shares)))
    return least if least == most else f"{least} to {most}"


def spread(values: Sequence[float]) -> str:
    """Write the median of ratios, with the smallest and the largest in brackets."""
    if not values:
        return ""
    middle, *ends = map(ratio, (median(values), min(values), max(values)))
    return middle if ends[0] == ends[1] else f"{middle} ({ends[0]} to {ends[1]})"


def mean_and_spread(values: Sequence[float]) -> str:
    """Write the mean, with the smallest and the largest in brackets."""
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def thousandths(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def bold(text: str) -> str:
    return f"**{text}**" if text else text


def bold_least(texts: Sequence[str], counts: Sequence[bool] | None = None) -> list[str]:
    """Make the smallest of the numbers that count bold; text in brackets is ignored."""
    written = [text.partition(" (")[0] for text in texts]
    known = {}
    for text, count in zip(written, counts or [True] * len(texts), strict=True):
        with suppress(ValueError):
            if count and not math.isnan(float(text)):
                known[text] = float(text)
    best = min(known, key=lambda text: known[text], default=None)
    return [bold(x) if short == best else x for x, short in zip(texts, written, strict=True)]


def markdown(rows: DataFrame | Sequence[dict[str, str]]) -> str:
    """Write a table of a document, with cells no wider than their text."""
    escaped = DataFrame(rows).replace(r"\|", r"\\|", regex=True)
    return re.sub("-{3,}", "---", re.sub(" {2,}", " ", _table(escaped, tablefmt="pipe")))


def plain(rows: DataFrame | Sequence[dict[str, str]]) -> str:
    """Write a table of a terminal."""
    return _table(DataFrame(rows).replace(r"\*\*", "", regex=True), tablefmt="plain")


def _table(frame: DataFrame, **layout: Any) -> str:
    """Write a table without columns that are empty or zero: numbers right, words left."""
    frame = frame.fillna("")
    frame = frame.loc[:, [any(map(_says_something, cells)) for _, cells in frame.items()]]
    aligned = ["right" if _is_of_numbers(x) else "left" for _, x in frame.items()]
    return frame.to_markdown(index=False, disable_numparse=True, colalign=aligned, **layout)


def _says_something(cell: str) -> bool:
    return bool(cell) and not re.fullmatch(r"0(\.0+)?( ?%)?", cell)


def _is_of_numbers(cells: Iterable[str]) -> bool:
    """Return whether most of a column's cells start with a number."""
    starts = [cell.lstrip("*x ")[:1].isdigit() for cell in cells if cell]
    return 2 * sum(starts) > len(starts)


def filled(words: str, width: int) -> str:
    """Break lines of text that are longer than ``width``; lines of tables stay."""
    lines = words.split("\n")
    return "\n".join(line if "  " in line else textwrap.fill(line, width) for line in lines)
