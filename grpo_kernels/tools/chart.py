"""Bars for a terminal: parts of the memory of a GPU."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_kernels.tools.text import aligned

_WIDTH = 40  # characters of a bar of 100 %
_MOST = 2 * _WIDTH  # of any bar
_GIB = 1 << 30


def bars(parts: Mapping[str, int], limit: int) -> list[str]:
    """Return a line for each part of ``limit`` bytes, in GiB, in percent and as a bar.

    What is free comes last; where parts are more than the limit, what is missing.
    """
    free = limit - sum(parts.values())
    last = {"free": free} if free >= 0 else {"missing": -free}
    sizes = {name: size for name, size in parts.items() if size} | last
    rows = [
        [name, f"{size / _GIB:.2f} GiB", f"{100 * size / limit:.0f} %"]
        for name, size in sizes.items()
    ]
    marks = ["." if name in last else "#" for name in sizes]
    return [
        f"{line}  {mark * min(_MOST, round(_WIDTH * size / limit))}".rstrip()
        for line, mark, size in zip(aligned(rows), marks, sizes.values(), strict=True)
    ]
