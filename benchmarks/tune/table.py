"""The generated table of tile sizes: read, changed, written."""

from __future__ import annotations

import runpy
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


def read(path: Path = PATH) -> dict[str, Any]:
    """Return the dictionaries of the file, by name."""
    values = runpy.run_path(str(path))
    return {name: values[name] for name, _, _ in _PARTS}


def write(table: dict[str, Any], path: Path = PATH) -> None:
    path.write_text(text(table))


def text(table: dict[str, Any]) -> str:
    """Return the file's text, formatted as ruff would."""
    parts = [f"# {note}\n{name}: {kind} = {_code(table[name])}\n" for name, note, kind in _PARTS]
    return "\n".join([_HEADER, *parts])


def _code(value: Any, indent: str = "") -> str:
    """Return a value as code, a dictionary sorted and with an entry per line."""
    if not isinstance(value, dict) or not value:
        return repr(value).replace("'", '"')
    inner = f"{indent}    "
    lines = [f"{inner}{_code(key)}: {_code(value[key], inner)},\n" for key in sorted(value)]
    return f"{{\n{''.join(lines)}{indent}}}"
