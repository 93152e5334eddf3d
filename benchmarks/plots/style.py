"""The look of a provider, the same in every picture: ours in blue and thick."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from benchmarks.derive import FLOOR, QUOTED, is_ours

_COLOURS = {
    "floor": "#111111",
    "ours": "#0050d8",
    "ours-input": "#2f9bff",
    "ours-one-pass": "#06606a",
    "ours-two-pass": "#0b8f9c",
    "ours-chunked": "#6d8fd0",
    "ours-reference": "#9fb2de",
    "eager": "#5a5a5a",
    "eager-entropy": "#9a9a9a",
    "compile": "#8c564b",
    "trl": "#ff7f0e",
    "liger": "#2ca02c",
    "liger-triton": "#0d5f1a",
    "liger-sm90": "#8fd14f",
    "cce": "#8b4fc6",
    "cce-exact": "#d77be0",
    "quack": "#d62728",
    "torch-lce": "#b39b00",
}
FAILED = "#d00000"
LOGITS = "(T, V) logits"  # no provider: the size of what is avoided
_OTHERS = ("#c2185b", "#00796b", "#5d4037", "#f9a825", "#455a64", "#ad7fa8")
_MARKERS = "osD^v<>PXhpd"


@dataclass(frozen=True, kw_only=True)
class Style:
    """Of one provider."""

    colour: str
    marker: str
    line: str
    width: float
    size: float  # of a marker
    weight: str  # of its name
    order: int  # what is drawn over what

    def curve(self) -> dict[str, Any]:
        """Arguments of a line."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.line,
            "linewidth": self.width,
            "markersize": self.size,
            "zorder": self.order,
        }


def style(provider: str) -> Style:
    if provider == LOGITS:
        return Style(
            colour="#777777", marker="", line="-.", width=1.2, size=0, weight="normal", order=1
        )
    known = list(_COLOURS)
    index = known.index(provider) if provider in known else zlib.crc32(provider.encode())
    colour = _COLOURS.get(provider) or _OTHERS[index % len(_OTHERS)]
    quoted, floor = provider in QUOTED, provider == FLOOR
    return Style(
        colour=colour,
        marker="" if floor else "o" if quoted else _MARKERS[1 + index % (len(_MARKERS) - 1)],
        line="--" if floor else ":" if is_ours(provider) and not quoted else "-",
        width=2.8 if quoted else 1.8 if floor else 1.3,
        size=6 if quoted else 4,
        weight="bold" if quoted else "normal",
        order=5 if quoted else 4 if floor else 3,
    )
