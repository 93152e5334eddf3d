"""Bar charts for a terminal: the parts of a GPU's memory."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_kernels.tools.text import aligned

_WIDTH = 40  # characters for 100 %
_LONGEST = 2 * _WIDTH
_GIB = 1 << 30


def bars(parts: Mapping[str, int], limit: int) -> list[str]:
    """Return a line for each part of ``limit`` bytes, in GiB, in percent and as a bar.

    The last line shows what is free, or what is missing if the parts exceed the limit.
    """
    free = limit - sum(parts.values())
    sizes = {name: size for name, size in parts.items() if size}
    sizes["free" if free >= 0 else "missing"] = abs(free)
    labels = aligned(
        [
            [name, f"{size / _GIB:.2f} GiB", f"{100 * size / limit:.0f} %"]
            for name, size in sizes.items()
        ]
    )
    lines = []
    for label, (name, size) in zip(labels, sizes.items(), strict=True):
        mark = "." if name in ("free", "missing") else "#"
        lines.append(f"{label}  {mark * min(_LONGEST, round(_WIDTH * size / limit))}".rstrip())
    return lines
