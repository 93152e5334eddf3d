"""Turns read by a response template, with transformers' parser.

The parser is new, and still changes from version to version. So what a text can make it raise is
told apart from what an unsupported version raises: the first is a ``ValueError`` when a turn is
read, the second an error before any turn is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

_LENIENT = "lenient json of grpo_trainer"  # its name among transformers' parsers
_LENIENCE = {"string_delims", "unquoted_keys"}  # what makes JSON lenient
# a template with what those of models use, a turn, and the message that it has to become
_PROBE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {
        "tool_calls": {
            "open_pattern": r"call (?P<name>\w+)\s*", "close_pattern": r";\s*", "repeats": True,
            "content": "json",
            "content_args": {"string_delims": [["'", "'"]], "unquoted_keys": True},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text", "close_pattern": r"<end>\s*|$"},
    },
}  # fmt: skip
_TURN = "so call f {a:'1',b:'2'}; call g {}; <end>\n"
_PARAMETERS = {"properties": {"a": {"type": "integer"}}}
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": _PARAMETERS}}]
_MESSAGE = {
    "role": "assistant",
    "content": "so",
    "tool_calls": [
        {"function": {"name": "f", "arguments": {"a": 1, "b": "2"}}},
        {"function": {"name": "g", "arguments": {}}},
    ],
}


def response_reader(
    tokenizer: PreTrainedTokenizerBase, template: dict[str, Any]
) -> Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]:
    """Return a function that reads the fields of a turn by ``template``.

    Its arguments are the turn, the text before it, and the schemas of the tools. It raises a
    ValueError if the turn does not fit the template.

    Raises:
        ValueError: ``template`` is no response template, or the installed transformers cannot read
            response templates, or reads them differently.
    """
    _check_transformers(tokenizer)
    compiled = _in_one_pass(template)

    def read(text: str, prefix: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
        try:
            return tokenizer.parse_response(text, compiled, prefix=prefix, tools=tools)
        except KeyError as error:  # a transform names what the text left out
            raise ValueError(f"response_template: {error}") from error

    return read


def _check_transformers(tokenizer: PreTrainedTokenizerBase) -> None:
    try:
        template = _in_one_pass(_PROBE)
        message = tokenizer.parse_response(_TURN, template, prefix="assistant:", tools=_TOOLS)
    except Exception as error:  # of any kind: it is raised as one that names the version
        raise _unsupported(f"which fails: {type(error).__name__}: {error}") from error
    if message != _MESSAGE:
        raise _unsupported(f"which reads {_TURN!r} as {message}")


def _unsupported(reason: str) -> ValueError:
    return ValueError(
        "transformers: expected a version that reads response templates (5.15 or newer), got "
        f"{transformers.__version__}, {reason}"
    )


def _in_one_pass(template: dict[str, Any]) -> Any:
    """Return a response template by which a text is read once.

    transformers' parser searches for all marks again after each one: a text full of one mark is
    searched for another one to its end each time. So is a text for the end of each quoted text,
    where keys have no quotes.

    Raises:
        ValueError: it is no response template.
    """
    # versions before 5.13 do not have it
    from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS
    from transformers.utils.chat_parsing.response_templates import load_response_template

    CONTENT_PARSERS[_LENIENT] = _lenient_json
    loaded = load_response_template(template)
    fields = {}
    for name, field in loaded.fields.items():
        lenient = field.content == "json" and not _LENIENCE.isdisjoint(field.content_args)
        fields[name] = replace(
            field,
            open_re=field.open_re and _Once(field.open_re),
            close_re=field.close_re and _Once(field.close_re),
            content=_LENIENT if lenient else field.content,
        )
    return replace(loaded, fields=fields)


def _lenient_json(text: str, content_args: dict[str, Any]) -> Any:
    """Read JSON whose strings may be between other marks, and whose keys may have no quotes.

    Args:
        text: the JSON.
        content_args: ``string_delims``, pairs of marks; whether there are ``unquoted_keys``; and
            with ``allow_non_json`` what is no JSON is text.

    Raises:
        ValueError: it is none.
    """
    # a string that does not end is one up to the end of the text, which is not JSON then
    marks = content_args.get("string_delims", [])
    parts = [rf"{re.escape(start)}(.*?)(?:{re.escape(end)}|\Z)" for start, end in marks]
    parts.append(r'"(?:[^"\\]|\\.?)*+(?:"|\Z)')
    if content_args.get("unquoted_keys"):
        parts.append(r"(?<=[{,])\s*+(\w++)(?=\s*+:)")

    def as_json(part: re.Match[str]) -> str:
        return part[0] if part.lastindex is None else json.dumps(part[part.lastindex])

    try:
        return json.loads(re.sub("|".join(parts), as_json, text, flags=re.DOTALL))
    except json.JSONDecodeError:
        if not content_args.get("allow_non_json"):
            raise
        return text.strip()


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

    def __getattr__(self, name: str) -> Any:  # the rest of a pattern
        return getattr(self.pattern, name)
