"""The figure of README: time and memory of the head's forward and backward, by library.

One picture for a light and one for a dark page, as SVG, from the rows of the tables' headlines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from benchmarks import text
from benchmarks.results import Group, Row
from benchmarks.tables import BARE

# who is drawn, and how readers call it; a version is that of the run
LIBRARIES = {
    "ours": ("grpo-kernels", ""),
    "trl": ("TRL", "trl"),
    "liger": ("Liger, chunked loss", "liger-kernel"),
    "liger-triton": ("Liger, Triton loss", "liger-kernel"),
    "compile": ("torch.compile", ""),
    "eager": ("eager PyTorch", ""),
}
THEMES = {
    "light": {"text": "#1f2328", "muted": "#59636e", "ours": "#0969da", "other": "#b6bfc9"},
    "dark": {"text": "#f0f6fc", "muted": "#9198a1", "ours": "#4493f8", "other": "#4d5763"},
}
_WIDTH, _LINE, _HEAD = 900, 26, 62
_BARS, _ERRORS = (186, 494), 806  # where the columns begin
_STRONG, _SMALL = 'font-weight="600"', 'font-size="12"'
_LONGEST = 230  # a bar; a number stands behind it


def draw(theme: str, groups: Sequence[Group]) -> str:
    """Draw a block for each group, one below the other."""
    colours, parts, top = THEMES[theme], list[str](), 0
    for group in groups:
        parts += _block(group, colours, top)
        top += _HEAD + _LINE * len(list(_rows(group))) + 18
    title = "Time and memory of an LM head's policy loss, forward and backward"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="14">',
        f"<title>{title}</title>",
        *parts,
        "</svg>\n",
    ])  # fmt: skip


def _rows(group: Group) -> Iterator[tuple[str, Row]]:
    """Go through who was measured: ours, then the others by time."""
    found = [(name, row) for name in LIBRARIES if (row := group[name]) and row.median]
    yield from sorted(found, key=lambda pair: (pair[0] != "ours", pair[1].median))


def _block(group: Group, colours: dict[str, str], top: int) -> Iterator[str]:
    """Draw what was measured where, then a line for each library."""
    facts, rows = group.facts, dict(_rows(group))
    shape = f"{facts['tokens']:,} tokens, hidden {facts['hidden']:,}, vocabulary "
    where = f"{group.where}, {facts['dtype']}: {shape}{facts['vocabulary']:,}"
    yield _text(0, top + 20, where, colours["text"], _STRONG)
    places = {name: top + _HEAD + line * _LINE for line, name in enumerate(rows)}
    for name, y in places.items():
        yield _text(0, y + 14, _label(name, group), colours["text"], _weight(name))
    times = {name: group.ratio(row, BARE) for name, row in rows.items()}
    sizes = {name: row.extra_bytes for name, row in rows.items()}
    panels: list[tuple[str, dict[str, Any], Callable[[Any], str]]] = [
        ("time, in that of the three bare GEMMs", times, text.ratio),
        ("extra memory, MiB", sizes, lambda size: f"{size / 2**20:,.0f}"),
    ]
    for left, (title, values, write) in zip(_BARS, panels, strict=True):
        yield _text(left, top + 46, title, colours["muted"], _SMALL)
        longest = max(value for value in values.values() if value is not None)
        for name, value in values.items():
            y = places[name]
            if value is None:
                yield _text(left, y + 14, "not measured", colours["muted"], _SMALL)
                continue
            width = _LONGEST * value / longest
            fill = colours["ours" if name == "ours" else "other"]
            size = f'width="{width:.1f}" height="18" rx="2"'
            yield f'<rect x="{left}" y="{y}" {size} fill="{fill}"/>'
            yield _text(left + width + 6, y + 14, write(value), colours["text"], _weight(name))
    yield _text(_ERRORS, top + 46, "gradient error", colours["muted"], _SMALL)
    for name, row in rows.items():
        error = text.error(row.worst("dhidden", "dweight"))
        yield _text(_ERRORS, places[name] + 14, error, colours["text"], _weight(name))


def _label(name: str, group: Group) -> str:
    label, package = LIBRARIES[name]
    return f"{label} {group.environment['versions'].get(package) or ''}".strip()


def _weight(name: str) -> str:
    return _STRONG if name == "ours" else ""


def _text(x: float, y: float, words: str, colour: str, more: str) -> str:
    return f'<text x="{x:.0f}" y="{y}" fill="{colour}" {more}>{escape(words)}</text>'
