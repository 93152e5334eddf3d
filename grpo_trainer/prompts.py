"""Prompts to tokens and completions to what reward functions read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict[str, Any]]  # plain text, or messages for the chat template


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    tools: Sequence[list[dict[str, Any]]] | None = None,
) -> list[list[int]]:
    """Token ids of each prompt, the last ``max_length`` of them.

    ``tools`` are the schemas of what each of them may call.

    Raises:
        ValueError: a prompt is neither text nor messages, or has no tokens.
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


def check_context(
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[list[int]],
    max_completion_length: int,
    context: int | None,
) -> None:
    """Raises ValueError unless every prompt leaves room for its completion.

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
    """``repr`` for a message: a prompt may be a whole book."""
    text = repr(value)
    return text if len(text) <= characters else text[:characters] + "..."


def decode_completions(
    completion_ids: Sequence[list[int]],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Any]:
    """Text for a plain prompt, an assistant message for a conversational one."""
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def _encode(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, template: dict[str, Any]
) -> list[int]:
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        # a prompt that ends with the assistant's words is continued, not answered
        answered = prompt[-1].get("role") == "assistant"
        ids = tokenizer.apply_chat_template(
            prompt,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=not answered,
            continue_final_message=answered,
            **template,
        )["input_ids"]
    else:
        raise ValueError(
            f"prompt: expected text or a list of messages, got {type(prompt).__name__}"
        )
    if not ids:
        raise ValueError(f"prompt: expected at least one token, got none from {shortened(prompt)}")
    return list(ids)
