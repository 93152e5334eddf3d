"""Plain text for the command line."""

from __future__ import annotations

from collections.abc import Sequence


class BadArgumentError(ValueError):
    """What the user of a command can put right; the message names the argument."""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns of equal width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def duration(seconds: float) -> str:
    """As a person reads it."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
