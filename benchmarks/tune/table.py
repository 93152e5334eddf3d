"""The generated table of tile sizes: read, changed, written."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_kernels.backends.configs import tuned

PATH = Path(tuned.__file__)

_HEADER = '''\
"""Tuned tile sizes. Written by ``make gpu-tune``; a change by hand is lost at its next run.

What is missing here runs with the defaults of ``rows.py`` and ``linear.py``, which also say what
the keys mean.
"""

from __future__ import annotations
'''
# name, comment, type
_PARTS = (
    (
        "MEASURED_ON",
        "device class -> what its entries were measured on",
        "dict[str, dict[str, str]]",
    ),
    (
        "ROW_CONFIGS",
        "device class, kernel, bits of a logit, vocabulary -> warps, 16-byte loads of a thread",
        "dict[tuple[str, str, int, str], tuple[int, int]]",
    ),
    (
        "LINEAR_CONFIGS",
        "device class, kernel, bits of a logit, width, vocabulary -> see ``LinearConfig``",
        "dict[tuple[str, str, int, str, str], tuple[int, ...]]",
    ),
    (
        "CHUNK_ROWS",
        "device class, bits of a logit, vocabulary -> rows of the logits tile",
        "dict[tuple[str, int, str], int]",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """The dictionaries of the file."""

    measured_on: dict[str, dict[str, str]]
    row_configs: dict[tuple[str, str, int, str], tuple[int, int]]
    linear_configs: dict[tuple[str, str, int, str, str], tuple[int, ...]]
    chunk_rows: dict[tuple[str, int, str], int]

    def with_device(
        self,
        device_class: str,
        facts: dict[str, str],
        entries: Mapping[str, Mapping[tuple[Any, ...], Any]],
    ) -> Table:
        """Return the table with all entries of one device replaced: its facts hold for each.

        ``entries`` has those of each dictionary but the first, by its name; their keys lack the
        device.
        """

        changed = {}
        for name, its_entries in entries.items():
            others = {k: v for k, v in getattr(self, name).items() if k[0] != device_class}
            changed[name] = others | {(device_class, *k): v for k, v in its_entries.items()}
        return replace(self, measured_on={**self.measured_on, device_class: facts}, **changed)

    def text(self) -> str:
        """Return the file's text, formatted as ruff would."""
        parts = [_HEADER]
        for name, comment, kind in _PARTS:
            entries = getattr(self, name.lower())
            parts.append(f"# {comment}\n{name}: {kind} = {dict_text(entries)}\n")
        return "\n".join(parts)

    def write(self, path: Path = PATH) -> None:
        path.write_text(self.text())


def read(path: Path = PATH) -> Table:
    """Return the table in a file on disk."""
    values = runpy.run_path(str(path))
    return Table(**{name.lower(): values[name] for name, _, _ in _PARTS})


def dict_text(entries: Mapping[Any, Any], indent: str = "") -> str:
    """Return a dictionary as code, one entry per line, sorted."""
    if not entries:
        return "{}"
    inner = f"{indent}    "
    lines = [f"{inner}{_text(key)}: {_value(entries[key], inner)},\n" for key in sorted(entries)]
    return f"{{\n{''.join(lines)}{indent}}}"


def _value(value: Any, indent: str) -> str:
    return dict_text(value, indent) if isinstance(value, dict) else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, float):
        return f"{value:g}".replace("e+", "e")
    return f'"{value}"' if isinstance(value, str) else str(value)
