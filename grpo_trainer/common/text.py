"""Text and values as a terminal may be given them and any file can hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# control characters but newline and tab, what turns the direction of writing around, half pairs
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(value: Any) -> Any:
    """Return ``value`` as None, numbers, text, lists and dictionaries, or else its text."""
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
    """Return ``text`` with escapes for halves of a surrogate pair: UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def printable(text: str) -> str:
    r"""Return ``text`` with its control characters written out, as in ``\x1b[2J``.

    A terminal would obey them: clear itself, rename its window, fill the clipboard.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(value: Any, characters: int = 200) -> str:
    """Return ``repr`` for a message: a prompt may be a whole book."""
    text = repr(value)
    return text if len(text) <= characters else text[:characters] + "..."
