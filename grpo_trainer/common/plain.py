"""Values as any file can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """``value`` of None, numbers, text, lists and dictionaries; what is none of these as text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # of numpy or torch
        return plain(value.tolist())
    return encodable(str(value))


def encodable(text: str) -> str:
    """``text``, with escapes for halves of a surrogate pair: UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
