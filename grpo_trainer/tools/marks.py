"""Finding the marks of a ``response_template`` in time that grows with the text, not its square."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


def in_one_pass(template: dict[str, Any]) -> Any:
    """Return a response template each of whose patterns reads a text once.

    transformers' parser searches for all marks again behind each that it found: a text full of one
    mark is searched for another one to its end each time.

    Raises:
        ValueError: it is no response template.
    """
    # not every transformers of version 5 has it
    from transformers.utils.chat_parsing.response_templates import load_response_template

    loaded = load_response_template(template)
    fields = {
        name: replace(field, open_re=_once(field.open_re), close_re=_once(field.close_re))
        for name, field in loaded.fields.items()
    }
    return replace(loaded, fields=fields)


def _once(pattern: Any) -> _Once | None:
    return None if pattern is None else _Once(pattern)


@dataclass
class _Once:
    """A compiled pattern that remembers its last match: still the next one if none was passed."""

    pattern: Any
    _asked: tuple[str, bool] = ("", False)
    _start: int = 0  # of the last search
    _found: Any = None

    def search(self, text: str, start: int, partial: bool = False) -> Any:
        asked, found = (text, partial), self._found
        ahead = self._start <= start and (found is None or start <= found.start())
        if asked != self._asked or not ahead:
            found = self.pattern.search(text, start, partial=partial)
            self._asked, self._start, self._found = asked, start, found
        return found
