"""How numbers and tables are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Of time."""

    name: str
    seconds: float

    def of(self, seconds: float | None) -> str:
        return "" if seconds is None else digits(seconds / self.seconds)


SECONDS, MILLISECONDS = Unit("s", 1.0), Unit("ms", 1e-3)


def unit_for(seconds: Iterable[float]) -> Unit:
    """One for all of a column."""
    return SECONDS if min(seconds, default=1.0) >= 0.1 else MILLISECONDS


def duration(seconds: float) -> str:
    unit = SECONDS if seconds >= 1 else MILLISECONDS
    return f"{unit.of(seconds)} {unit.name}"


def digits(value: float | None, count: int = 3) -> str:
    """``count`` significant digits, never an exponent."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = count - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(places, 0)}f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def mib(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def error(value: float | None) -> str:
    """One digit: 9e-7."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def yes_no(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def bold(text: str) -> str:
    return f"**{text}**" if text else text


def bold_least(values: Sequence[float | None], texts: Sequence[str]) -> list[str]:
    """``texts`` with those of the smallest value, as it is written, in bold."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    best = texts[values.index(min(known))] if known else None
    return [bold(text) if text == best else text for text in texts]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Numbers to the right, words to the left."""
    body = [list(row) for row in rows]
    rules = [
        "---:" if _is_of_numbers(line[i] for line in body) else "---" for i in range(len(header))
    ]
    lines = [header, rules, *body]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def without_empty(
    header: Sequence[str], rows: Iterable[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Without the columns in which nothing is said."""
    lines = [list(row) for row in rows]
    kept = [i for i in range(len(header)) if i == 0 or any(line[i] for line in lines)]
    return [header[i] for i in kept], [[line[i] for i in kept] for line in lines]


def _is_of_numbers(cells: Iterable[str]) -> bool:
    """Whether most of a column that is not empty starts with a number."""
    starts = [cell.lstrip("*")[:1].isdigit() for cell in cells if cell]
    return 2 * sum(starts) > len(starts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def anchor(heading: str) -> str:
    """The name under which a heading can be linked to."""
    kept = (c for c in heading.lower() if c.isalnum() or c in " -_")
    return "".join(kept).replace(" ", "-")
