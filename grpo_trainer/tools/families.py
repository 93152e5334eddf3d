"""How families of models write tool calls, in transformers' words (a ``response_template``).

A tokenizer that comes without one gets that of its family, which its chat template shows: each
writes calls between marks that no other has.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedTokenizerBase

_TAGGED_THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}


def with_response_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of ``tokenizer`` with its family's response template, or itself if it has one
    or is of no family here."""
    written = tokenizer.chat_template
    if getattr(tokenizer, "response_template", None) is not None or not isinstance(written, str):
        return tokenizer
    for marks, template in _FAMILIES.values():
        if all(mark in written for mark in marks):
            tokenizer = copy.copy(tokenizer)
            tokenizer.response_template = template
            break
    return tokenizer


def _template(
    anchor: dict[str, str],
    calls: dict[str, Any],
    content: dict[str, str],
    thought: dict[str, str] | None = _TAGGED_THOUGHT,
) -> dict[str, Any]:
    """Return a response template; ``calls`` matches one call, whose name is the group ``name``."""
    function = {"name": "{name}", "arguments": "{content}"}
    made = {"repeats": True, "transform": {"type": "function", "function": function}}
    fields: dict[str, Any] = {} if thought is None else {"reasoning_content": thought}
    fields |= {"tool_calls": made | calls, "content": {"content": "text"} | content}
    return {"defaults": {"role": "assistant"}, "fields": fields} | anchor


def _tags(pattern: str, **values: Any) -> dict[str, Any]:
    """Say that arguments are ``key`` and ``value`` of ``pattern``; schemas give them types."""
    parser = values or {"name": "text"}
    return {
        "content": "xml-inline",
        "content_args": {"tag_pattern": pattern, "value_parser": parser},
    }


_CHATML = {"start_anchor": "<|im_start|>assistant\n"}
_CHATML_END = {"close_pattern": r"<\|im_end\|>\s*"}

# Python's: what stands in brackets may hold commas and brackets, three deep
_ATOM = r"[^\[\]{}'\"]|'[^']*'|\"[^\"]*\""
_INNER = _ATOM
for _depth in range(3):
    _INNER = rf"{_ATOM}|[\[{{](?:{_INNER})*[\]}}]"
_PYTHON = rf"(?P<key>\w+)=(?P<value>'[^']*'|[\[{{](?:{_INNER})*[\]}}]|[^,)]*)"

# family -> marks of its chat template, and how it answers
_FAMILIES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "gpt-oss": (
        ("<|channel|>", "functions."),
        _template(
            {"start_anchor": "<|start|>assistant"},
            {
                "open_pattern": r"(?:<\|channel\|>commentary)?\s*to=functions\.(?P<name>[^\s<]+)"
                r"(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
                "close_pattern": r"<\|call\|>\s*",
                "content": "json",
            },
            {
                "open": "<|channel|>final<|message|>",
                "close_pattern": r"(?:<\|return\|>|<\|end\|>)\s*",
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
            {
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
            {
                "open_pattern": r"(?:<\|tool_call_start\|>\[|,\s*)(?P<name>\w+)\(",
                "close_pattern": r"\)(?:\]<\|tool_call_end\|>)?\s*",
            }
            | _tags(
                _PYTHON,
                name="json",
                args={"string_delims": [["'", "'"]], "allow_non_json": True},
            ),
            _CHATML_END,
        ),
    ),
    "Qwen 3.5, Qwen 3.6, Nemotron 3": (
        ("<function=", "<parameter=", "<|im_start|>"),
        _template(
            _CHATML,
            {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
                "close_pattern": r"</tool_call>\s*",
            }
            | _tags(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
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
            | _tags(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
            {"close_pattern": r"<\|(?:user|observation)\|>\s*|$"},
        ),
    ),
    "Llama 3.1, Llama 3.2": (
        ('"parameters": ', "<|start_header_id|>"),
        _template(
            {"start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n"},
            {
                "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
                "close_pattern": r"\}\s*<\|(?:eot|eom)_id\|>\s*",
                "content": "json",
            },
            {"close_pattern": r"<\|(?:eot|eom)_id\|>\s*"},
            thought=None,
        ),
    ),
}
