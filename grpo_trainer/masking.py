"""Settings and messages without secrets."""

from __future__ import annotations

import re
from typing import Any

_NAMES = r"(token|password|passwd|secret|api[_-]?key|access[_-]?key|authorization)"
_SECRET = re.compile(_NAMES + "$", re.IGNORECASE)


def masked(value: Any, name: str = "", named: bool = True) -> Any:
    """Return ``value`` with ``<NAME>`` in place of what is called a token, a password or the like.

    Dictionaries, lists and tuples are copied, and URLs lose user and password. Without ``named``
    None takes the place, as if it had not been given: for settings that somebody may load.
    """
    if isinstance(value, dict):  # all that is in a secret is one
        names = {key: name if _SECRET.search(name) else str(key) for key in value}
        return {key: masked(item, names[key], named) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [masked(item, name, named) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, bool):  # token=True: the one that is stored
        return value
    if _SECRET.search(name):
        return f"<{name.upper()}>" if named else None
    return masked_urls(value) if isinstance(value, str) else value


def masked_urls(text: str) -> str:
    """Return ``text`` with its URLs without user and password."""
    return re.sub(r"(?<=://)[^/?#\s]*@", "***@", text)


def masked_url(url: str) -> str:
    """Return one URL without user and password, also if it is not written as URLs are."""
    return re.sub(r"^(\w+://)?.*@", r"\1***@", url, flags=re.DOTALL)


def masked_text(text: str) -> str:
    """Return settings that could not be read, cut off where they begin to name a secret."""
    found = re.search(_NAMES, text, re.IGNORECASE)
    return masked_urls(text if found is None else f"{text[: found.end()]}...")
