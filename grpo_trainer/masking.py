"""Removes secrets from settings and messages before files, trackers and terminals get them."""

from __future__ import annotations

import re
from typing import Any

# A name is split into words, "X-Api-Key" and "xApiKey" into x, api and key. The last one decides.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_LATER = ("header", "headers", "pem")  # words that may follow it
_SECRET = re.compile(
    "pwd|auth|authorization|bearer|cookies?|credentials?|jwt|sas|session"
    "|.*(password|passwd|passphrase|secret|apikey|accesskey|privatekey)s?"
)
# with one of these words before it, a token or a key is not secret
_OF_TEXT = re.compile(
    "[bes]os|eod|pad|unk|sep|cls|mask|bo[ia]|eo[ia]|image|img|video|audio|vision|start|end|stop"
    "|special|blank|think|per"
)
_OF_DATA = re.compile(
    "sort|order|group|cache|primary|foreign|partition|prompt|completion|answer|label|target|input"
    "|output|column|row|image|text|content|message|reward|metric|state|query|dataset|data|id|role"
    "|name|field|dict|json|map|lookup|att|attention|prng|rng|random"
)
# with one of these, tokens or keys in the plural are secret
_OF_ACCESS = re.compile("api|access|auth|bearer|refresh|secret|private|ssh|hub|hf")

_URL = re.compile(r"""(?<=://)([^/?#\s]*@)?([^?#\s'"<>]*)([?#][^\s'"<>]*)?""")
_BEARER = re.compile(r"\b(bearer)\s+[\w.~+/-]{8,}=*", re.IGNORECASE)
_PAIR = re.compile(r"""\b([A-Za-z][\w-]*)=([^\s&;,'"]+)""")


def is_secret(name: str) -> bool:
    """Return whether a value of this name is a password, a token, a key or another secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    while words and words[-1] in _LATER:
        words.pop()
    before, last = ["", "", *words][-2:]
    if last.endswith("token"):
        return _OF_TEXT.fullmatch(before) is None
    if last == "key":
        return _OF_DATA.fullmatch(before) is None
    if last in ("tokens", "keys"):
        return _OF_ACCESS.fullmatch(before) is not None
    return _SECRET.fullmatch(last) is not None or (before, last) == ("session", "id")


def masked(value: Any, name: str = "", named: bool = True) -> Any:
    """Return ``value`` with ``<NAME>`` in place of values with a secret's name (:func:`is_secret`).

    Dictionaries, lists and tuples are copied, and texts go through :func:`masked_text`. Without
    ``named``, None replaces secrets, as if they had not been given: for settings that are loaded
    again.
    """
    if isinstance(value, dict):  # everything inside a secret is secret
        names = {key: name if is_secret(name) else str(key) for key in value}
        return {key: masked(item, names[key], named) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [masked(item, name, named) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, bool):  # token=True means the stored one
        return value
    if is_secret(name):
        return f"<{name.upper()}>" if named else None
    return masked_text(value) if isinstance(value, str) else value


def masked_text(text: str) -> str:
    """Return ``text`` without the users, passwords and query values in its URLs, bearer tokens, and
    the values of pairs like ``password=...``."""
    text = _BEARER.sub(r"\1 ***", _URL.sub(_masked_parts, text))
    return _PAIR.sub(lambda pair: f"{pair[1]}=***" if is_secret(pair[1]) else pair[0], text)


def _masked_parts(url: re.Match[str]) -> str:
    query = re.sub(r"=[^&;#]*", "=***", url[3] or "")
    query = re.sub(r"(?<=[?&;#])[^=&;#]+(?=[&;#]|$)", "***", query)
    return f"{'***@' if url[1] else ''}{url[2]}{query}"


def masked_url(url: str) -> str:
    """Return one URL without parts that may be secret, even if it is not a valid URL."""
    url = re.sub(r"^(\w+://)?.*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"(?<=[?#]).+", "***", url, flags=re.DOTALL)


def cut_at_secret(text: str) -> str:
    """Return settings that could not be parsed, cut off before the first name of a secret."""
    names = re.finditer(r"[A-Za-z][\w-]*", text)
    end = next((found.end() for found in names if is_secret(found[0])), None)
    return masked_text(text if end is None else f"{text[:end]}...")
