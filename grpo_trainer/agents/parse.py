"""From the tokens of a turn to the assistant's message, tool calls included."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_trainer.common import encodable
from grpo_trainer.data import Prompt, decode_completions


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
        name: replace(field, open_re=_Once.of(field.open_re), close_re=_Once.of(field.close_re))
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

    @classmethod
    def of(cls, pattern: Any) -> _Once | None:
        return None if pattern is None else cls(pattern)

    def search(self, text: str, start: int, partial: bool = False) -> Any:
        ahead = self._start <= start and (self._match is None or start <= self._match.start())
        if self._searched != (text, partial) or not ahead:
            self._searched, self._start = (text, partial), start
            self._match = self.pattern.search(text, start, partial=partial)
        return self._match


_TAGGED_THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}


def _of_family(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Return the response template of the tokenizer's family; None: it is of none here."""
    if not tokenizer.chat_template:
        return None
    written = tokenizer.get_chat_template(tools=[])  # of several, the one for tools
    templates = (
        template for marks, template in _FAMILIES.values() if all(mark in written for mark in marks)
    )
    return next(templates, None)


def _template(
    anchor: dict[str, str],
    calls: dict[str, Any],
    content: dict[str, Any],
    thought: dict[str, str] | None = _TAGGED_THOUGHT,
) -> dict[str, Any]:
    """Return a response template; ``calls`` matches one call, or several as text."""
    fields: dict[str, Any] = {} if thought is None else {"reasoning_content": thought}
    fields |= {"tool_calls": {"repeats": True} | calls, "content": {"content": "text"} | content}
    return {"defaults": {"role": "assistant"}, "fields": fields} | anchor


def _tags(pattern: str) -> dict[str, Any]:
    """Say that arguments are ``key`` and ``value`` of ``pattern``; schemas give them types.

    Whatever else stands in a call matches without a key, which is an error: the turn is text.
    """
    values = {"name": "text", "args": {"strip": False}}  # indentation may be part of a text
    parser = {"tag_pattern": rf"{pattern}|\S", "value_parser": values}
    return _CALL_FIELDS | {"content": "xml-inline", "content_args": parser}


# the call of the function that the group ``name`` of a pattern names
_CALL_FIELDS = {
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
}
_CHATML = {"start_anchor": "<|im_start|>assistant\n"}
_CHATML_END = {"close_pattern": r"<\|im_end\|>\s*"}

# family -> marks of its chat template, and how it answers
_FAMILIES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "gpt-oss": (
        ("<|channel|>", "functions."),
        _template(
            {"start_anchor": "<|start|>assistant"},
            _CALL_FIELDS
            | {
                # nothing is tried twice: in a text of marks that would take its length squared
                "open_pattern": r"(?:<\|channel\|>commentary\s*+)?"
                r"to=functions\.(?P<name>[^\s<=]++)"
                r"(?:<\|channel\|>commentary)?\s*+(?:<\|constrain\|>)?(?:json)?<\|message\|>",
                "close_pattern": r"<\|call\|>\s*",
                "content": "json",
            },
            {
                # commentary to nobody is for the user; text may come without a channel
                "open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>"
                r"|\A(?!\s*(?:<\||to=functions\.))",
                "close_pattern": r"(?:<\|return\|>|<\|end\|>)\s*",
                "repeats": True,
                "join": "\n",
            },
            {
                "open": "<|channel|>analysis<|message|>",
                "close_pattern": r"<\|end\|>\s*",
                "content": "text",
            },
        ),
    ),
    "Gemma 4": (
        ("<|tool_call>call:", "<|turn>"),
        _template(
            {"start_anchor_pattern": r"(?:<\|turn>model\n|<tool_response\|>)"},
            _CALL_FIELDS
            | {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close_pattern": r"<tool_call\|>\s*",
                "content": "json",
                "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            },
            {"close_pattern": r"(?:<turn\|>|<\|tool_response>|<eos>)\s*|$"},
            {
                "open": "<|channel>thought\n",
                "close_pattern": r"<channel\|>\s*",
                "content": "text",
            },
        ),
    ),
    "LFM2.5": (
        ("<|tool_call_start|>", "<|im_start|>"),
        _template(
            _CHATML,
            # calls in Python, which a pattern cannot read
            {
                "open": "<|tool_call_start|>[",
                "close_pattern": r"\]<\|tool_call_end\|>\s*",
                "content": "text",
            },
            _CHATML_END,
        ),
    ),
    "Qwen 3.5, Qwen 3.6, Nemotron 3": (
        ("<function=", "<parameter=", "<|im_start|>"),
        _template(
            _CHATML,
            {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
                "close_pattern": r"</function>\s*</tool_call>\s*",
            }
            | _tags(
                r"<parameter=(?P<key>[^>\n]+)>\n?"
                r"(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
            ),
            _CHATML_END,
        ),
    ),
    "GLM 4 MoE": (
        ("<arg_key>", "<|assistant|>"),
        _template(
            {"start_anchor": "<|assistant|>"},
            {
                "open_pattern": r"<tool_call>(?P<name>[^\s<]+)\s*",
                "close_pattern": r"</tool_call>\s*",
            }
            | _tags(
                r"<arg_key>(?P<key>[^<]+)</arg_key>\s*"
                r"<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>"
            ),
            {"close_pattern": r"<\|(?:user|observation)\|>\s*|$"},
        ),
    ),
    "Llama 3.1, Llama 3.2": (
        ('"parameters": ', "<|start_header_id|>"),
        _template(
            {"start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n"},
            _CALL_FIELDS
            | {
                "open_pattern": r"(?:<\|python_tag\|>)?"
                r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
                "close_pattern": r"\}\s*(?:<\|(?:eot|eom)_id\|>\s*|\Z)",
                "content": "json",
            },
            {"close_pattern": r"<\|(?:eot|eom)_id\|>\s*"},
            thought=None,
        ),
    ),
}


Message = dict[str, Any]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_CALLED = "</tool_call>"
_DEPTH = 100  # of lists and dictionaries in a call: what reads a message may call itself for each
_THINKS = "<think>"
_OPENING = 16  # tokens that a generation prompt may open a thought with
_THOUGHT = re.compile(rf"\s*{_THINKS}(.*?)(?:</think>\s*|\Z)", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}


class TurnParser:
    """Reads a turn with the tokenizer's ``response_template``, where it has one.

    With ``families``, that of the tokenizer's family will do. Otherwise calls are
    ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen and Hermes models write
    them, after a thought between ``<think>`` and ``</think>``, if the turn begins with one. A turn
    with a call that cannot be read has no calls: it is text.
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
            template = _of_family(tokenizer)
        self._template = None if template is None else in_one_pass(template)

    def parse(self, ids: list[int], prefix: list[int], tools: list[dict[str, Any]]) -> Message:
        """Return the message ``{"role", "content"}``, with ``reasoning_content`` and
        ``tool_calls`` if there are any.

        Args:
            ids: the turn.
            prefix: the tokens before it.
            tools: schemas, by which arguments get their types.
        """
        # tags may be special tokens, which are left out only where there are none
        decode = self._tokenizer.decode
        ended = ids[-1] in self._eos
        text, end = decode(ids), decode(ids[-1:]) if ended else ""
        before = decode(prefix if self._template else prefix[-_OPENING:])
        message = self.read(text, end, before, tools)
        return message or {"role": "assistant", "content": decode(ids, skip_special_tokens=True)}

    def completions(
        self, prompts: Sequence[Prompt], prompt_ids: list[list[int]], ids: list[list[int]]
    ) -> list[Any]:
        """Return the text of each completion, or the message if the prompt has messages."""
        completions = decode_completions(ids, prompts, self._tokenizer)
        if self._template is None:
            return completions
        return [
            text if isinstance(text, str) else [self.parse(ids[row], prompt_ids[row], [])]
            for row, text in enumerate(completions)
        ]

    def read(self, text: str, end: str, prefix: str, tools: list[dict[str, Any]]) -> Message | None:
        """Read text. ``end`` closes the turn. None: it is no more than text."""
        try:
            if self._template is None:
                return _clean(_tagged(text.removesuffix(end), prefix))
            read = self._tokenizer.parse_response
            return _clean(_message(read(text, self._template, prefix=prefix, tools=tools), end))
        except Exception:  # a policy can write what no reader was made for: that is text too
            return None


def _message(parsed: dict[str, Any], end: str) -> Message:
    # some templates leave the end in the text, or in a thought that was not closed
    texts = {k: v.removesuffix(end) for k, v in parsed.items() if isinstance(v, str)}
    message: Message = {"role": "assistant"} | parsed | texts
    message["content"] = message.get("content") or ""
    if "tool_calls" in message:
        message["tool_calls"] = [
            call
            for each in message["tool_calls"]
            for call in (_from_python(each) if isinstance(each, str) else [_call(each["function"])])
        ]
    return message


def _tagged(text: str, prefix: str) -> Message | None:
    message: Message = {"role": "assistant", "content": text}
    if prefix.rstrip().endswith(_THINKS):  # a generation prompt may open the thought
        text = _THINKS + text
    thought = _THOUGHT.match(text)
    if thought is not None:
        message["content"] = text = text[thought.end() :]
        if thought[1].strip():
            message["reasoning_content"] = thought[1].strip()
    # behind the last end nothing matches, which would be found out from each begin anew
    end = text.rfind(_CALLED) + len(_CALLED)
    called, rest = text[:end], text[end:]
    calls = [_call(json.loads(written)) for written in _CALL.findall(called)]
    if calls:
        message |= {"content": (_CALL.sub("", called) + rest).strip(), "tool_calls": calls}
    return message if calls or thought is not None else None


def tool_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call, as chat templates take it."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _call(function: Any) -> dict[str, Any]:
    """Return the call of a function with named arguments. Any error: it is none."""
    name, arguments = function["name"], function["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"tool call: expected a name and arguments, got {function!r}")
    return tool_call(name, arguments)


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _from_python(text: str) -> list[dict[str, Any]]:
    """Read ``name(key=value), ...``, whose values are Python's literals or JSON's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a backslash that escapes nothing
        tree = _JsonNames().visit(ast.parse(f"[{text}]", mode="eval"))
    calls = []
    for call in tree.body.elts:
        if call.args or not all(each.arg for each in call.keywords):
            raise ValueError("tool call: expected named arguments")
        values = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        # what JSON has not: TypeError
        calls.append(tool_call(call.func.id, json.loads(json.dumps(values))))
    return calls


def _clean(value: Any, depth: int = _DEPTH) -> Any:
    """Return a copy with texts that a tokenizer takes. ValueError: it is nested too deep."""
    if isinstance(value, str):
        return encodable(value)
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        raise ValueError(f"tool call: expected at most {_DEPTH} levels")
    if isinstance(value, dict):
        return {_clean(key): _clean(item, depth - 1) for key, item in value.items()}
    return [_clean(item, depth - 1) for item in value]
