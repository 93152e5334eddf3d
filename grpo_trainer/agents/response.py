"""Turns read by a response template, with transformers' parser."""

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
        name: replace(
            field,
            open_re=field.open_re and _Once(field.open_re),
            close_re=field.close_re and _Once(field.close_re),
        )
        for name, field in loaded.fields.items()
    }
    return replace(loaded, fields=fields)


@dataclass
class _Once:
    """A compiled pattern that remembers its last match: still the next one if none was passed."""

    pattern: Any
    _searched: tuple[str, bool] = ("", False)
    _start: int = 0  # of the last search
    _match: Any = None

    def search(self, text: str, start: int, partial: bool = False) -> Any:
        ahead = self._start <= start and (self._match is None or start <= self._match.start())
        if self._searched != (text, partial) or not ahead:
            self._searched, self._start = (text, partial), start
            self._match = self.pattern.search(text, start, partial=partial)
        return self._match
