"""The end of a run in one screen: all that a remote reader may see of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.parts import Done

_WIDTH = 118
_MOST_LINES = 38
_DETAILS = 9  # lines of one part, where there is room
_HEADLINE = 6  # lines that the details leave to it
_FILES = 8


def summary(
    title: str, done: Sequence[Done], headline: Sequence[str], folder: Path, files: Sequence[Path]
) -> str:
    """Parts, what failed in them, the ratios, the files."""
    lines = ["", title]
    lines += [
        f"{part.name:<11} {part.outcome.state:<8} {part.seconds:5.0f} s  {part.outcome.note}"
        for part in done
    ]
    ending = _listing(folder, files)
    room = _MOST_LINES - len(lines) - len(ending)
    lines += _details(done, room - _HEADLINE)
    lines += _first(headline, _MOST_LINES - len(lines) - len(ending))
    return "\n".join(_cut(line) for line in [*lines, *ending])


def _details(done: Sequence[Done], room: int) -> list[str]:
    """``room`` lines at most, shared by the parts that have something to say."""
    told = [part for part in done if part.outcome.lines]
    each = min(_DETAILS, room // max(1, len(told)) - 1)
    lines: list[str] = []
    for part in told:
        shown = _first(part.outcome.lines, each)
        lines += [f"{part.name}:", *(f"  {line}" for line in shown)]
    return lines


def _listing(folder: Path, files: Sequence[Path]) -> list[str]:
    names = [str(path.relative_to(folder)) for path in files]
    return [f"{len(files)} files in {folder}:", *(f"  {name}" for name in _first(names, _FILES))]


def _first(lines: Sequence[str], count: int) -> list[str]:
    """``count`` lines at most; the last says how many were left out."""
    if len(lines) <= count:
        return list(lines)
    return [*lines[: count - 1], f"... and {len(lines) - count + 1} more"]


def _cut(line: str) -> str:
    line = line.replace("\n", " ")
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."
