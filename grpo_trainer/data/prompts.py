"""Prompts to tokens and completions to what reward functions read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict[str, Any]]  # plain text, or messages for the chat template


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    tools: Sequence[list[dict[str, Any]]] | None = None,
) -> list[list[int]]:
    """Return token ids of each prompt, the last ``max_length`` of them.

    ``tools`` are the schemas of what each of them may call.

    Raises:
        ValueError: a prompt is neither text nor messages, the chat template fails on it, or it has
            no tokens.
    """
    known: dict[tuple[str, str], list[int]] = {}  # a group repeats its prompt
    encoded = []
    for prompt, shown in zip(prompts, tools or [[]] * len(prompts), strict=True):
        key = repr(prompt), repr([tool["function"]["name"] for tool in shown])
        if key not in known:
            # some templates write an introduction to an empty list
            options = {"tools": shown or None} | (chat_template_kwargs or {})
            ids = _encode(prompt, tokenizer, options)
            known[key] = ids if max_length is None else ids[-max_length:]
        encoded.append(known[key])
    return encoded


def check_prompts(rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError unless the ``prompt`` of every row that has one is text or messages.

    An environment makes the prompts of rows that have none.
    """
    for row in rows:
        wrong = _wrong(row["prompt"]) if "prompt" in row else None
        if wrong is not None:
            raise ValueError(f"{_EXPECTED}, got {wrong} in the row {shortened(row)}")


def check_context(
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[list[int]],
    max_completion_length: int,
    context: int | None,
) -> None:
    """Raise ValueError unless every prompt leaves room for its completion.

    ``context`` is the number of tokens that the policy has positions for; None: any number.
    """
    if context is None:
        return
    longest = max(range(len(prompts)), key=lambda index: len(prompt_ids[index]))
    room, length = context - max_completion_length, len(prompt_ids[longest])
    if length > room:
        raise ValueError(
            f"prompt: expected at most {room} tokens (the model's {context} positions less "
            f"max_completion_length = {max_completion_length}), got {length} tokens from "
            f"{shortened(prompts[longest])}; max_prompt_length cuts prompts"
        )


def shortened(value: Any, characters: int = 200) -> str:
    """Return ``repr`` for a message: a prompt may be a whole book."""
    text = repr(value)
    return text if len(text) <= characters else text[:characters] + "..."


def decode_completions(
    completion_ids: Sequence[list[int]],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Any]:
    """Return text for a plain prompt, an assistant message for a conversational one."""
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def _encode(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, template: dict[str, Any]
) -> list[int]:
    wrong = _wrong(prompt)
    if wrong is not None:
        raise ValueError(f"{_EXPECTED}, got {wrong}")
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])
    else:
        ids = _rendered(prompt, tokenizer, template)
    if not ids:
        raise ValueError(f"prompt: expected at least one token, got none from {shortened(prompt)}")
    return ids


def _rendered(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, template: dict[str, Any]
) -> list[int]:
    # a prompt that ends with the assistant's words is continued, not answered
    answered = messages[-1]["role"] == "assistant"
    try:
        rendered = tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=not answered,
            continue_final_message=answered,
            **template,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise ValueError(
            f"prompt: the chat template fails on {shortened(messages)}: {error}"
        ) from error
    return list(rendered["input_ids"])


_EXPECTED = "prompt: expected text, or a list of messages with role and content"


def _wrong(prompt: Any) -> str | None:
    """Say what a prompt is that is none."""
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list):
        return type(prompt).__name__
    return "an empty list" if not prompt else next(filter(None, map(_wrong_message, prompt)), None)


def _wrong_message(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"{type(message).__name__} among messages"
    missing = [] if isinstance(message.get("role"), str) else ["role"]
    # a turn that only calls tools says nothing
    if message.get("content") is None and not message.get("tool_calls"):
        missing.append("content")
    return f"a message without {' and '.join(missing)}" if missing else None
