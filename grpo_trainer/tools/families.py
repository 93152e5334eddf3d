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
    if getattr(tokenizer, "response_template", None) is not None or not tokenizer.chat_template:
        return tokenizer
    written = tokenizer.get_chat_template(tools=[])  # of several, the one for tools
    for marks, template in _FAMILIES.values():
        if all(mark in written for mark in marks):
            tokenizer = copy.copy(tokenizer)
            tokenizer.response_template = template
            break
    return tokenizer


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
    return _CALL | {"content": "xml-inline", "content_args": parser}


# the call of the function that the group ``name`` of a pattern names
_CALL = {
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
            _CALL
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
            _CALL
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
            _CALL
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
