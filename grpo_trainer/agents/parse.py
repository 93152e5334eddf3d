"""Parse the tokens of a turn into the assistant's message, including tool calls.

transformers' parser for response templates is new, and still changes between versions. A
``ValueError`` means that a text cannot be parsed. Any other error means that the version is not
supported: it stops the run at the start, when the chat template is tested.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
import yaml
from transformers import PreTrainedTokenizerBase

from grpo_trainer.common import encodable, shortened
from grpo_trainer.data import Prompt, decode_completions

Message = dict[str, Any]

_FAMILIES = Path(__file__).with_name("families.yaml")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_CALL_END = "</tool_call>"
_MAX_DEPTH = 100  # of lists and dictionaries in a call: code that reads messages may recurse
_THINK = "<think>"
_THOUGHT = re.compile(rf"\s*{_THINK}(.*?)(?:</think>\s*|\Z)", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}
_LENIENT = "lenient json of grpo_trainer"  # its name among transformers' parsers
_LENIENCE = {"string_delims", "unquoted_keys"}  # options of lenient JSON


def _family_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Return the response template of the tokenizer's family, or None if it is unknown."""
    if not tokenizer.chat_template:
        return None
    template = tokenizer.get_chat_template(tools=[])  # the one for tools, if there are several
    for family in yaml.safe_load(_FAMILIES.read_text())["families"].values():
        if all(mark in template for mark in family["marks"]):
            return family["template"]
    return None


class TurnParser:
    """Parses a turn with the tokenizer's ``response_template``, if it has one.

    With ``families``, a tokenizer without a template gets the template of its model family.
    Otherwise calls have the format of Qwen and Hermes models, ``<tool_call>{"name": ...,
    "arguments": {...}}</tool_call>``, after a thought between ``<think>`` and ``</think>`` if the
    turn begins with one. A turn with a malformed call has no calls: it is text.

    Raises:
        ValueError: the template is invalid, or the installed transformers has no parser for it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Collection[int],
        families: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos = set(eos_token_ids)
        template = getattr(tokenizer, "response_template", None)
        if template is None and families:
            template = _family_template(tokenizer)
        if template is not None:
            template = _in_one_pass(template)
        self._template: Any = template

    def parse(self, ids: list[int], prefix: list[int], tools: list[dict[str, Any]]) -> Message:
        """Return the message ``{"role", "content"}``, with ``reasoning_content`` and ``tool_calls``
        if there are any.

        Args:
            ids: the tokens of the turn.
            prefix: the tokens before it.
            tools: schemas, which give arguments their types.
        """
        # tags may be special tokens: skip special tokens only if there are no tags
        decode = self._tokenizer.decode
        end = decode(ids[-1:]) if ids[-1] in self._eos else ""
        message = self.read(decode(ids), end, decode(prefix), tools)
        return message or {"role": "assistant", "content": decode(ids, skip_special_tokens=True)}

    def completions(
        self, prompts: Sequence[Prompt], prompt_ids: list[list[int]], ids: list[list[int]]
    ) -> list[Any]:
        """Return the text of each completion, or its message if the prompt has messages."""
        completions = decode_completions(ids, prompts, self._tokenizer)
        if self._template is None:
            return completions
        return [
            text if isinstance(text, str) else [self.parse(ids[row], prompt_ids[row], [])]
            for row, text in enumerate(completions)
        ]

    def read(self, text: str, end: str, prefix: str, tools: list[dict[str, Any]]) -> Message | None:
        """Return the message of a turn that ends with ``end``; None if it is only text."""
        try:
            if self._template is None:
                return _clean(_tagged(text.removesuffix(end), prefix))
            return _clean(_message(self._parsed(text, prefix, tools), end))
        except (ValueError, RecursionError):  # a policy's text can cause these
            return None
        except Exception as error:
            error.add_note(
                f"while parsing a turn with transformers {transformers.__version__}: "
                f"{shortened(text)}"
            )
            raise

    def _parsed(self, text: str, prefix: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of a turn from the template. ValueError: it does not match."""
        try:
            return self._tokenizer.parse_response(text, self._template, prefix=prefix, tools=tools)
        except KeyError as error:  # a transform needs a part that the text lacks
            raise ValueError(f"response_template: {error}") from error


def _in_one_pass(template: dict[str, Any]) -> Any:
    """Return a response template that scans a text only once.

    transformers' parser searches for all marks again after each match: in a text full of one mark,
    it scans to the end for another mark each time. With unquoted keys, it also scans for the end
    of each quoted text.

    Raises:
        ValueError: it is not a response template.
    """
    try:
        from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError as error:
        raise ValueError(
            "transformers: expected a version that reads response templates (5.15 or newer), got "
            f"{transformers.__version__}"
        ) from error

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
    """Parse JSON with other string delimiters, or with unquoted keys.

    Args:
        text: the JSON.
        content_args: ``string_delims``, pairs of marks; ``unquoted_keys``; and ``allow_non_json``,
            which returns invalid JSON as text.

        Raises:
            ValueError: it is invalid.
    """
    # an unterminated string extends to the end of the text, which is then not JSON
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
    """A compiled pattern that remembers its last match, which is still the next one if not
    passed."""

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

    def __getattr__(self, name: str) -> Any:  # the pattern's other attributes
        return getattr(self.pattern, name)


def _message(parsed: dict[str, Any], end: str) -> Message:
    # some templates leave the end token in the text, or in an unclosed thought
    texts = {k: v.removesuffix(end) for k, v in parsed.items() if isinstance(v, str)}
    message: Message = {"role": "assistant"} | parsed | texts
    message["content"] = message.get("content") or ""
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"])
    return message


def _calls(fields: Any) -> list[dict[str, Any]]:
    """Return the calls of a message. ValueError: a call is malformed."""
    if not isinstance(fields, list):
        raise ValueError(f"tool_calls: expected a list, got {shortened(fields)}")
    calls = []
    for field in fields:
        if isinstance(field, str):
            calls += _from_python(field)
        elif isinstance(field, dict):
            calls.append(_call(field.get("function")))
        else:
            raise ValueError(f"tool call: expected a function, got {shortened(field)}")
    return calls


def _tagged(text: str, prefix: str) -> Message | None:
    message: Message = {"role": "assistant", "content": text}
    if prefix.rstrip().endswith(_THINK):  # a generation prompt may open the thought
        text = _THINK + text
    thought = _THOUGHT.match(text)
    if thought is not None:
        message["content"] = text = text[thought.end() :]
        if thought[1].strip():
            message["reasoning_content"] = thought[1].strip()
    # after the last end nothing matches, but the pattern would search from each beginning
    end = text.rfind(_CALL_END) + len(_CALL_END)
    before_end, rest = text[:end], text[end:]
    calls = [_call(json.loads(function)) for function in _CALL.findall(before_end)]
    if calls:
        message |= {"content": (_CALL.sub("", before_end) + rest).strip(), "tool_calls": calls}
    return message if calls or thought is not None else None


def tool_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call in the format of chat templates."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _call(function: Any) -> dict[str, Any]:
    """Return the call of a function with named arguments. ValueError: it is not a call."""
    fields = function if isinstance(function, dict) else {}
    name, arguments = fields.get("name"), fields.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"tool call: expected a name and arguments, got {shortened(function)}")
    return tool_call(name, arguments)


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _from_python(text: str) -> list[dict[str, Any]]:
    """Parse ``name(key=value), ...`` with values that are Python or JSON literals.

    Raises:
        ValueError: ``text`` is anything else.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences
            tree = ast.parse(f"[{text}]", mode="eval")
    except (SyntaxError, MemoryError) as error:  # MemoryError: nested too deep
        raise ValueError(f"tool call: expected Python, got {shortened(text)}") from error
    calls = _JsonNames().visit(tree.body)
    if not isinstance(calls, ast.List):
        raise ValueError(f"tool call: expected a list of calls, got {shortened(text)}")
    return [_python_call(call) for call in calls.elts]


def _python_call(call: ast.expr) -> dict[str, Any]:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("tool call: expected a name and arguments")
    if call.args or not all(keyword.arg for keyword in call.keywords):
        raise ValueError("tool call: expected named arguments")
    try:
        values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        arguments = json.loads(json.dumps(values))
    except TypeError as error:  # values that JSON does not have, and unhashable keys
        raise ValueError(f"tool call: expected JSON values: {error}") from error
    return tool_call(call.func.id, arguments)


def _clean(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Return a copy with texts that UTF-8 can encode. ValueError: it is nested too deep."""
    if isinstance(value, str):
        return encodable(value)
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        raise ValueError(f"tool call: expected at most {_MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {_clean(key): _clean(item, depth - 1) for key, item in value.items()}
    return [_clean(item, depth - 1) for item in value]
