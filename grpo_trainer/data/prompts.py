"""Turn prompts into tokens, and completions into what reward functions read."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from grpo_trainer.common import shortened
from grpo_trainer.data.images import ImageInputs, image_source, images_of, in_blocks, parts_of

Prompt = str | list[dict[str, Any]]  # plain text, or messages for the chat template
ProcessingClass: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin


class Encoded(NamedTuple):
    """A prompt as model inputs."""

    ids: list[int]
    images: ImageInputs | None = None  # set with a processor, even without images


def tokenizer_of(processing_class: ProcessingClass) -> PreTrainedTokenizerBase:
    """Return the tokenizer; a processor's tokenizer gets the processor's chat template."""
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
    """Return each prompt's token ids, the last ``max_length`` of them, and its image inputs.

    ``tools`` has the schemas of the tools that each prompt may call.

    Raises:
        ValueError: a prompt is neither text nor messages, the chat template fails on it or omits
            its images, it has half of a surrogate pair or no tokens, or a prompt with images has
            more than ``max_length`` tokens.
    """
    encoded: dict[str, Encoded] = {}
    keys = []
    for prompt, shown in zip(prompts, tools or [[]] * len(prompts), strict=True):
        # a group repeats its prompt and images; the images' reprs tell prompts apart
        keys.append(repr((prompt, [tool["function"]["name"] for tool in shown])))
        if keys[-1] not in encoded:
            # some templates write an introduction even for an empty list
            options = {"tools": shown or None} | (chat_template_kwargs or {})
            one = _encode(prompt, processing_class, options)
            encoded[keys[-1]] = _cut(prompt, one, max_length)
    return [encoded[key] for key in keys]


def check_prompt(row: Mapping[str, Any], name: str = "prompt") -> None:
    """Raise ValueError if ``row`` has a prompt that is neither text nor messages of text and
    images.

    For anything else the chat template would write a placeholder, and the model would not see it.
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


def _wrong(prompt: Any) -> str | None:
    """Return what is wrong with a prompt, or None."""
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list):
        return type(prompt).__name__
    for message in prompt:
        if not isinstance(message, dict):
            return f"{type(message).__name__} among messages"
        missing = [] if isinstance(message.get("role"), str) else ["role"]
        # a turn that only calls tools has no content
        if message.get("content") is None and not message.get("tool_calls"):
            missing.append("content")
        if missing:
            return f"a message without {' and '.join(missing)}"
    return None if prompt else "an empty list"


def decode_completions(
    completion_ids: Sequence[list[int]],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Any]:
    """Return text for a text prompt, and an assistant message for a message prompt."""
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def _encode(prompt: Prompt, processing_class: ProcessingClass, template: dict[str, Any]) -> Encoded:
    check_prompt({"prompt": prompt})
    images = images_of(prompt)
    sees = isinstance(processing_class, ProcessorMixin)
    if images and not sees:
        raise ValueError(
            "processing_class: expected a processor for prompts with images, got "
            f"{type(processing_class).__name__}, which ignores them"
        )
    if isinstance(prompt, str):
        text, special = prompt, True
    else:
        text = _rendered(in_blocks(prompt) if sees else prompt, processing_class, template)
        # as in transformers: no special tokens are added to the text of a template
        bos = processing_class.tokenizer.bos_token if sees else None
        special = sees and (bos is None or not text.startswith(bos))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt: expected text that UTF-8 can hold, got {text[error.start]!r}, half of a "
            f"surrogate pair, as character {error.start} of {shortened(text)}"
        ) from error
    if sees:
        _check_places(prompt, text, len(images), processing_class.image_token)
    encoded = encode_text(text, images, processing_class, special)
    if not encoded.ids:
        raise ValueError(f"prompt: expected at least one token, got none from {shortened(prompt)}")
    return encoded


def _rendered(
    messages: list[dict[str, Any]], processing_class: ProcessingClass, template: dict[str, Any]
) -> str:
    # a prompt that ends with the assistant's words is continued, not answered
    if getattr(processing_class, "chat_template", "") is None and "chat_template" not in template:
        name = tokenizer_of(processing_class).name_or_path
        raise ValueError(
            f"prompt: expected text, since the tokenizer of {name!r} has no chat template, got "
            f"{shortened(messages)}; use an instruct model, or set tokenizer.chat_template"
        )
    answered = messages[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not answered, "continue_final_message": answered}
    try:
        return processing_class.apply_chat_template(messages, tokenize=False, **options, **template)
    except (TemplateError, TypeError, ValueError) as error:
        raise ValueError(
            f"prompt: the chat template fails on {shortened(messages)}: {error}"
        ) from error


def _check_places(prompt: Prompt, text: str, images: int, token: str) -> None:
    """Raise ValueError if a prompt's text contains the token of an image."""
    parts = [{"text": prompt}] if isinstance(prompt, str) else parts_of(in_blocks(prompt))
    mentioned = any(token in str(part.get("text")) for part in parts)
    if mentioned and text.count(token) > images:
        raise ValueError(
            f"prompt: expected no {token} in a text (for an image, add a message part "
            f"{{'type': 'image'}}), got {shortened(text)}"
        )


def encode_text(
    text: str, images: tuple[Any, ...], processing_class: ProcessingClass, special: bool = False
) -> Encoded:
    """Encode with a tokenizer, or with a processor, which writes as many tokens per image as the
    model needs.

    Args:
        special: whether to add the tokens that a text begins or ends with.

    Raises:
        ValueError: ``text`` does not have one place for each of ``images``.
    """
    if not isinstance(processing_class, ProcessorMixin):
        return Encoded(list(processing_class(text, add_special_tokens=special)["input_ids"]))
    token = processing_class.image_token
    if text.count(token) != len(images):
        raise ValueError(
            f"processing_class: expected a chat template that writes {token} for each image, "
            f"{len(images)} in all, got {text.count(token)} in {shortened(text)}"
        )
    options = {"add_special_tokens": special, "return_tensors": "pt"}
    given = [list(images)] if images else None
    inputs = dict(processing_class(text=[text], images=given, **options))
    ids = short_ids = inputs.pop("input_ids")[0].tolist()
    inputs.pop("attention_mask", None)
    if not images and not inputs:
        return Encoded(ids)
    if images:
        short_ids = processing_class.tokenizer(text, add_special_tokens=special)["input_ids"]
    return Encoded(ids, ImageInputs(images, inputs, short_ids, len(ids)))


def _cut(prompt: Prompt, encoded: Encoded, max_length: int | None) -> Encoded:
    ids, images = encoded
    if max_length is None or len(ids) <= max_length:
        return encoded
    if images is not None and images.images:
        raise ValueError(
            f"max_prompt_length: expected at least {len(ids)} (prompts with images are not cut), "
            f"got {max_length} for {shortened(prompt)}"
        )
    ids = ids[-max_length:]
    if images is not None:  # without an image, all inputs are per token
        inputs = {name: value[:, -max_length:] for name, value in images.inputs.items()}
        images = ImageInputs((), inputs, ids, len(ids))
    return Encoded(ids, images)
