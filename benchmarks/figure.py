"""The figure in README: time, memory and error of the head's forward and backward, by library.

SVG files for light and dark pages and for wide and narrow screens, from the result files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any
from xml.sax.saxutils import escape

from benchmarks import text
from benchmarks.results import Group, Row
from benchmarks.tables import BARE

# providers in the figure with their labels; the package whose version the label shows
LIBRARIES = {
    "ours": ("grpo-kernels", ""),
    "ours-two-pass": ("grpo-kernels, two_pass", ""),
    "trl": ("TRL", "trl"),
    "liger": ("Liger, chunked loss", "liger-kernel"),
    "liger-triton": ("Liger, Triton loss", "liger-kernel"),
    "compile": ("torch.compile", ""),
    "eager": ("eager PyTorch", ""),
}
OURS = ("ours", "ours-two-pass")
THEMES = {
    "light": {
        "page": "#ffffff",
        "text": "#1f2328",
        "muted": "#59636e",
        "ours": "#0969da",
        "other": "#b6bfc9",
    },
    "dark": {
        "page": "#0d1117",
        "text": "#f0f6fc",
        "muted": "#9198a1",
        "ours": "#4493f8",
        "other": "#4d5763",
    },
}
_LINE, _TITLE, _BAR = 26, 22, 18  # heights
_LONGEST_TIME = 3.0
_LONGEST_BYTES = 3 * 2**30
_STRONG, _SMALL = 'font-weight="600"', 'font-size="12"'


@dataclass(frozen=True)
class Layout:
    """Where things are: columns next to each other, or stacked and each with its own labels.

    ``bars`` has the length of each column's longest bar; 0 prints numbers without bars.
    """

    width: int
    columns: tuple[int, ...]
    bars: tuple[int, ...]
    stacked: bool = False


LAYOUTS = {
    "wide": Layout(900, (192, 508, 768), (200, 185, 0)),
    "narrow": Layout(420, (190, 190), (160, 160), stacked=True),
}


@dataclass(frozen=True)
class Column:
    """One quantity of all libraries."""

    title: str
    values: dict[str, Any]  # by library; None: not measured
    write: Callable[[Any], str]
    cut: float = math.inf  # longer bars end here and are broken

    @property
    def longest(self) -> float:
        return min(self.cut, max(filter(None, self.values.values())))


def draw(theme: str, layout: str, groups: Sequence[Group]) -> str:
    """Draw a block for each group, one below the other."""
    colors, place = THEMES[theme], LAYOUTS[layout]
    parts, top = list[str](), 0
    for group in groups:
        parts += _block(group, place, colors, top)
        top += _height(group, place)
    size = f'width="{place.width}" height="{top}" viewBox="0 0 {place.width} {top}"'
    font = 'font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="14"'
    title = "Time, memory and error of an LM head's policy loss, forward and backward"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>',
        f"<title>{title}</title>",
        *parts,
        "</svg>\n",
    ])  # fmt: skip


def pictures(groups: Sequence[Group]) -> dict[str, str]:
    """Return all pictures by the names of their files."""
    return {
        f"head-{theme}{'-narrow' * (layout == 'narrow')}.svg": draw(theme, layout, groups)
        for theme, layout in product(THEMES, LAYOUTS)
    }


def _columns(group: Group, rows: dict[str, Row]) -> list[Column]:
    return [
        Column(
            "time (1 = the three matmuls alone; lower is better)",
            {name: group.ratio(row, BARE) for name, row in rows.items()},
            text.ratio,
            cut=_LONGEST_TIME,
        ),
        Column(
            "extra memory, MiB (lower is better)",
            {name: row.extra_bytes for name, row in rows.items()},
            lambda size: f"{size / 2**20:,.0f}",
            cut=_LONGEST_BYTES,
        ),
        Column(
            "gradient error vs fp64",
            {name: row.worst("dhidden", "dweight") for name, row in rows.items()},
            text.error,
        ),
    ]


def _block(group: Group, place: Layout, colors: dict[str, str], top: int) -> Iterator[str]:
    """Yield a group's title and columns."""
    facts = group.facts
    lines = [f"{facts['model'].title()} head on one {group.where}"]
    lines += [f"{facts['tokens']:,} tokens, {facts['dtype']}, forward and backward"]
    for line in lines if place.stacked else [", ".join(lines)]:
        top += _TITLE
        yield _text(0, top, line, colors["text"], _STRONG)
    rows = dict(_rows(group))
    height = _column_height(group)
    for number, column in enumerate(_columns(group, rows)[: len(place.columns)]):
        x, longest = place.columns[number], place.bars[number]
        at = top + number * height * place.stacked
        yield _text(0 if place.stacked else x, at + 22, column.title, colors["muted"], _SMALL)
        for line, name in enumerate(rows):
            y = at + _TITLE + 12 + line * _LINE
            if place.stacked or number == 0:
                yield _text(0, y + 14, _label(name, group), colors["text"], _weight(name))
            yield from _value(column, name, x, y, longest, colors)


def _column_height(group: Group) -> int:
    return _TITLE + _LINE * len(list(_rows(group))) + 10


def _height(group: Group, place: Layout) -> int:
    """Return the height of a group's block, with the space below it."""
    titles, columns = (2, len(place.columns)) if place.stacked else (1, 1)
    return titles * _TITLE + columns * _column_height(group) + 22


def _value(
    column: Column, name: str, x: int, y: int, longest: int, colors: dict[str, str]
) -> Iterator[str]:
    """Draw one library's bar followed by its number, or only the number."""
    value = column.values[name]
    if value is None:
        yield _text(x, y + 14, "not measured", colors["muted"], _SMALL)
        return
    end: float = x
    if longest:
        width = longest * min(value, column.longest) / column.longest
        size = f'width="{width:.1f}" height="{_BAR}" rx="2"'
        fill = colors["ours" if name in OURS else "other"]
        yield f'<rect x="{x}" y="{y}" {size} fill="{fill}"/>'
        if value > column.cut:
            yield _break(x + 0.9 * width, y, colors["page"])
        end += width + 6
    yield _text(end, y + 14, column.write(value), colors["text"], _weight(name))


def _break(x: float, y: int, color: str) -> str:
    """Draw the gap in a bar that is longer than its column."""
    shape = f"M{x:.1f} {y + _BAR + 1} l8 -{_BAR + 2}"
    return f'<path d="{shape}" stroke="{color}" stroke-width="5"/>'


def _rows(group: Group) -> Iterator[tuple[str, Row]]:
    """Yield the libraries that were measured: ours first, then the others by time."""
    found = [(name, row) for name in LIBRARIES if (row := group[name]) and row.median]
    yield from sorted(found, key=lambda pair: (pair[0] not in OURS, pair[1].median))


def _label(name: str, group: Group) -> str:
    label, package = LIBRARIES[name]
    return f"{label} {group.environment['versions'].get(package) or ''}".strip()


def _weight(name: str) -> str:
    return _STRONG if name in OURS else ""


def _text(x: float, y: float, words: str, color: str, more: str) -> str:
    return f'<text x="{x:.0f}" y="{y}" fill="{color}" {more}>{escape(words)}</text>'
