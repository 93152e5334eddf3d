"""The generated table of tile sizes: read, changed, written."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_kernels.logprob import row_configs

PATH = Path(row_configs.__file__)

_HEADER = '''\
"""Tuned tile sizes. Written by ``make gpu-tune``; a change by hand is lost at its next run.

What is missing here runs with the defaults of ``tiles.py``, which also says what the keys mean.
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
        "CHUNK_ROWS",
        "device class, bits of a logit, vocabulary -> rows of the logits tile",
        "dict[tuple[str, int, str], int]",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """The three dictionaries of the file."""

    measured_on: dict[str, dict[str, str]]
    row_configs: dict[tuple[str, str, int, str], tuple[int, int]]
    chunk_rows: dict[tuple[str, int, str], int]

    def with_device(
        self,
        device_class: str,
        facts: dict[str, str],
        rows: Mapping[tuple[str, int, str], tuple[int, int]],
        chunks: Mapping[tuple[int, str], int],
    ) -> Table:
        """All entries of one device replaced, so that the facts hold for each of them."""

        def others(entries: Mapping[Any, Any]) -> dict[Any, Any]:
            return {key: value for key, value in entries.items() if key[0] != device_class}

        return replace(
            self,
            measured_on={**self.measured_on, device_class: facts},
            row_configs={
                **others(self.row_configs),
                **{(device_class, *key): value for key, value in rows.items()},
            },
            chunk_rows={
                **others(self.chunk_rows),
                **{(device_class, *key): value for key, value in chunks.items()},
            },
        )

    def text(self) -> str:
        """The file; formatted as ruff would."""
        values = (self.measured_on, self.row_configs, self.chunk_rows)
        parts = [_HEADER]
        for (name, comment, kind), entries in zip(_PARTS, values, strict=True):
            parts.append(f"# {comment}\n{name}: {kind} = {_dict(entries)}\n")
        return "\n".join(parts)

    def write(self, path: Path = PATH) -> None:
        path.write_text(self.text())


def read(path: Path = PATH) -> Table:
    """The file as it is on disk."""
    values = runpy.run_path(str(path))
    return Table(**{name.lower(): values[name] for name, _, _ in _PARTS})


def _dict(entries: Mapping[Any, Any], indent: str = "") -> str:
    """One entry a line, sorted."""
    if not entries:
        return "{}"
    inner = f"{indent}    "
    lines = [f"{inner}{_text(key)}: {_value(entries[key], inner)},\n" for key in sorted(entries)]
    return f"{{\n{''.join(lines)}{indent}}}"


def _value(value: Any, indent: str) -> str:
    return _dict(value, indent) if isinstance(value, dict) else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return f'"{value}"' if isinstance(value, str) else str(value)
