"""Prompts to tokens and completions to what reward functions read."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from grpo_trainer.common import shortened
from grpo_trainer.data.images import (
    ImageInputs,
    digest,
    image_source,
    images_of,
    in_blocks,
    parts_of,
)

Prompt = str | list[dict[str, Any]]  # plain text, or messages for the chat template
ProcessingClass: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin


class Encoded(NamedTuple):
    """A prompt as a model takes it."""

    ids: list[int]
    images: ImageInputs | None = None  # with a processor; also of a prompt without images


def tokenizer_of(processing_class: ProcessingClass) -> PreTrainedTokenizerBase:
    """Return the tokenizer, a processor's with the processor's chat template."""
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return processing_class
    tokenizer = processing_class.tokenizer
    if tokenizer.chat_template is None and processing_class.chat_template is not None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = processing_class.chat_template
    return tokenizer


def encode_prompts(
    prompts: Sequence[Prompt],
    processing_class: ProcessingClass,
    max_length: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    tools: Sequence[list[dict[str, Any]]] | None = None,
) -> list[Encoded]:
    """Return token ids of each prompt, the last ``max_length`` of them, and its images' inputs.

    ``tools`` are the schemas of what each of them may call.

    Raises:
        ValueError: a prompt is neither text nor messages, the chat template fails on it or leaves
            its images out, it has no tokens, or one with images has more than ``max_length``.
    """
    encoded: dict[str, Encoded] = {}
    keys = []
    for prompt, shown in zip(prompts, tools or [[]] * len(prompts), strict=True):
        # a group repeats its prompt, with the same images, which the text of each tells apart
        keys.append(repr((prompt, [tool["function"]["name"] for tool in shown])))
        if keys[-1] not in encoded:
            # some templates write an introduction to an empty list
            options = {"tools": shown or None} | (chat_template_kwargs or {})
            one = _encode(prompt, processing_class, options)
            encoded[keys[-1]] = _cut(prompt, one, max_length)
    return [encoded[key] for key in keys]


def check_prompt(row: Mapping[str, Any], name: str = "prompt") -> None:
    """Raise ValueError unless the prompt of ``row``, if it has one, is text, or messages of text
    and images.

    The chat template would write a placeholder for anything else, and the model would not see it.
    """
    wrong = _wrong(row["prompt"]) if "prompt" in row else None
    if wrong is not None:
        raise ValueError(
            f"{name}: expected text, or a list of messages with role and content, got {wrong} in "
            f"the row {shortened(row)}"
        )
    for part in parts_of(row.get("prompt")):
        if not isinstance(part, Mapping):
            raise ValueError(
                f"{name}: expected parts of messages as {{'type': ...}}, got {shortened(part)}"
            )
        kind = part.get("type")
        if kind not in (None, "text", "image") or (kind is None and image_source(part) is not None):
            raise ValueError(
                f"{name}: expected prompts of text and images, got a message with a part of type "
                f"{kind!r}"
            )


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


def _encode(prompt: Prompt, processing_class: ProcessingClass, template: dict[str, Any]) -> Encoded:
    check_prompt({"prompt": prompt})
    if isinstance(processing_class, ProcessorMixin):
        encoded = _processed(prompt, processing_class, template)
    elif images_of(prompt):
        raise ValueError(
            "processing_class: expected a processor for prompts with images, got "
            f"{type(processing_class).__name__}, which leaves them out"
        )
    elif isinstance(prompt, str):
        encoded = Encoded(list(processing_class(prompt)["input_ids"]))
    else:
        rendered = _rendered(prompt, processing_class, template, tokenize=True, return_dict=True)
        encoded = Encoded(list(rendered["input_ids"]))
    if not encoded.ids:
        raise ValueError(f"prompt: expected at least one token, got none from {shortened(prompt)}")
    return encoded


def _processed(prompt: Prompt, processor: ProcessorMixin, template: dict[str, Any]) -> Encoded:
    images = images_of(prompt)
    special = True
    if isinstance(prompt, str):
        text = prompt
    else:
        text = _rendered(in_blocks(prompt), processor, template, tokenize=False)
        # as transformers has it: a template that writes the first token itself is the last word
        bos = processor.tokenizer.bos_token
        special = bos is None or not text.startswith(bos)
    parts = [{"text": prompt}] if isinstance(prompt, str) else parts_of(in_blocks(prompt))
    mentioned = any(processor.image_token in str(part.get("text")) for part in parts)
    if mentioned and text.count(processor.image_token) > len(images):
        raise ValueError(
            f"prompt: expected no {processor.image_token} in a text (an image goes where a message "
            f"has a part {{'type': 'image'}}), got {shortened(text)}"
        )
    return encode_text(text, images, processor, special)


def encode_text(
    text: str, images: tuple[Any, ...], processor: ProcessorMixin, special: bool = False
) -> Encoded:
    """Encode by a processor: it writes as many tokens for an image as the model needs.

    Args:
        special: add the tokens that a text begins or ends with.

    Raises:
        ValueError: ``text`` has not one place for each of ``images``.
    """
    places = text.count(processor.image_token)
    if places != len(images):
        raise ValueError(
            f"processing_class: expected a chat template that writes {processor.image_token} for "
            f"each image, {len(images)} in all, got {places} in {shortened(text)}"
        )
    options = {"add_special_tokens": special, "return_tensors": "pt"}
    inputs = dict(processor(text=[text], images=[list(images)] if images else None, **options))
    ids = inputs.pop("input_ids")[0].tolist()
    inputs.pop("attention_mask", None)
    short_ids = ids
    if images:
        short_ids = processor.tokenizer(text, add_special_tokens=special)["input_ids"]
    if not images and not inputs:
        return Encoded(ids)
    digests = tuple(map(digest, images))
    return Encoded(ids, ImageInputs(images, digests, inputs, short_ids, len(ids)))


def _cut(prompt: Prompt, encoded: Encoded, max_length: int | None) -> Encoded:
    if max_length is None or len(encoded.ids) <= max_length:
        return encoded
    if encoded.images is not None and encoded.images.images:
        raise ValueError(
            f"max_prompt_length: expected at least {len(encoded.ids)} (prompts with images are not "
            f"cut), got {max_length} for {shortened(prompt)}"
        )
    ids = encoded.ids[-max_length:]
    if encoded.images is None:
        return Encoded(ids)
    # without images all of it is per token
    inputs = {name: value[:, -max_length:] for name, value in encoded.images.inputs.items()}
    return Encoded(ids, ImageInputs((), (), inputs, ids, len(ids)))


def _rendered(
    messages: list[dict[str, Any]],
    processing_class: ProcessingClass,
    template: dict[str, Any],
    **options: Any,
) -> Any:
    # a prompt that ends with the assistant's words is continued, not answered
    answered = messages[-1]["role"] == "assistant"
    try:
        return processing_class.apply_chat_template(
            messages,
            add_generation_prompt=not answered,
            continue_final_message=answered,
            **options,
            **template,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise ValueError(
            f"prompt: the chat template fails on {shortened(messages)}: {error}"
        ) from error


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
