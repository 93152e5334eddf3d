"""What a vLLM server is asked, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers.image_utils import is_pil_image
from transformers.utils import get_json_schema

from grpo_trainer.common import shortened
from grpo_trainer.data import data_url
from grpo_trainer.engines import Completions, TokenIds

_NEVER = -9999.0  # vLLM's stand-in for minus infinity, which JSON does not have
_ROUNDING = 1e-2  # by so much a log-probability may be above 0


def completions_of(
    choices: Sequence[dict[str, Any]],
    prompts: Sequence[TokenIds | None],
    n: int,
    max_tokens: int,
    logprobs: int | None,
    vocab_size: int | None,
) -> tuple[list[TokenIds], Completions]:
    """Return the prompts' ids, and ``n`` completions per prompt in order with log-probabilities.

    The other arguments are what was asked for; a prompt is None if only the server knows its ids.
    With ``logprobs`` above 0 the choices have those of the likeliest ids, too, and so the sampling
    mask. ``vocab_size`` is None where it is unknown.

    Raises:
        ValueError, KeyError, TypeError: the answer is no such thing.
    """
    choices = sorted(choices, key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(n * len(prompts))):
        raise ValueError(f"{len(choices)} choices")
    prompt_ids = [  # those that were sent, or those that the server says it has
        _checked_ids(first["prompt_token_ids"], vocab_size) if prompt is None else prompt
        for prompt, first in zip(prompts, choices[::n], strict=True)
    ]
    token_ids, values, mask = [], [], []
    for choice in choices:
        ids = _checked_ids(choice["token_ids"], vocab_size)
        if not 0 < len(ids) <= max_tokens:
            raise ValueError(f"{len(ids)} tokens, expected 1 to max_tokens = {max_tokens}")
        own = prompt_ids[choice["index"] // n]
        if choice["prompt_token_ids"] not in (None, own):  # None: that of the choice before
            raise ValueError("the completion of another prompt")
        token_ids.append(ids)
        if logprobs is not None:
            values.append(_numbers(choice["logprobs"]["token_logprobs"], len(ids)))
        if logprobs:
            likeliest = choice["logprobs"]["top_logprobs"]
            mask.append([_checked_ids(_left(each), vocab_size) for each in likeliest])
            if len(mask[-1]) != len(ids):
                raise ValueError(f"{len(mask[-1])} sets of ids for {len(ids)} tokens")
    columns = (None if logprobs is None else values, mask if logprobs else None)
    return prompt_ids, Completions(token_ids, *columns)


def _checked_ids(ids: TokenIds, vocab_size: int | None) -> TokenIds:
    end = math.inf if vocab_size is None else vocab_size
    wrong = [token for token in ids if type(token) is not int or not 0 <= token < end]
    if wrong:
        raise ValueError(f"token id {wrong[0]!r}, expected 0 <= id < {end}")
    return ids


def _left(likely: dict[str, float]) -> TokenIds:
    """Return the ids, which come as ``token_id:7``."""
    return [int(name.partition(":")[2]) for name, value in likely.items() if value > _NEVER]


def _numbers(values: list[float | None], count: int) -> list[float]:
    if len(values) != count:
        raise ValueError(f"{len(values)} log-probabilities for {count} tokens")
    numbers = [math.nan if value is None else float(value) for value in values]  # NaN: unknown
    if any(value > _ROUNDING for value in numbers):
        raise ValueError(f"log-probability {max(numbers)}, expected at most 0")
    return [math.nan if value <= _NEVER else value for value in numbers]


Messages = list[dict[str, Any]]
Choices = list[dict[str, Any]]

_IMAGE_PARTS = ("image", "image_pil")  # kinds of a message's part, and where it has the image


class Question(NamedTuple):
    """A request, and how its answer becomes choices of a completion request."""

    path: str
    body: dict[str, Any]
    choices: Callable[[Any], Choices]
    prompt_ids: list[TokenIds | None]  # of each prompt; None: only the server knows them


def checked_prompts(prompts: Any) -> list[str] | list[TokenIds] | list[Messages]:
    """Return the prompts as lists.

    Raises:
        ValueError: they are not all texts, lists of token ids, or lists of messages.
    """
    if isinstance(prompts, Sequence) and not isinstance(prompts, str) and len(prompts) > 0:
        if all(isinstance(prompt, str) for prompt in prompts):
            return list(prompts)
        if all(_are_ids(prompt) for prompt in prompts):
            return [list(prompt) for prompt in prompts]
        if all(are_messages(prompt) for prompt in prompts):
            return [list(prompt) for prompt in prompts]
    raise ValueError(
        "prompts: expected a list of texts, of lists of token ids, or of lists of messages, got "
        f"{shortened(prompts)}"
    )


def _are_ids(prompt: Any) -> bool:
    is_list = isinstance(prompt, list | tuple)
    return is_list and all(type(token) is int and token >= 0 for token in prompt)


def are_messages(prompt: Any) -> bool:
    """Return whether it is a conversation."""
    is_list = isinstance(prompt, list | tuple) and len(prompt) > 0
    return is_list and all(isinstance(message, Mapping) for message in prompt)


def checked_images(images: Any, count: int) -> list[list[Any]]:
    """Return the images of each of ``count`` prompts: None is none, one that is no list is one.

    Raises:
        ValueError: they are not one entry per prompt.
    """
    if images is None:
        return [[] for _ in range(count)]
    if not isinstance(images, list | tuple) or len(images) != count:
        got = len(images) if isinstance(images, list | tuple) else type(images).__name__
        raise ValueError(
            f"images: expected {count} entries, one per prompt (an image, a list of them, or "
            f"None), got {got}"
        )
    return [
        [] if entry is None else list(entry) if isinstance(entry, list | tuple) else [entry]
        for entry in images
    ]


def ask_all(prompts: Sequence[str | TokenIds], sampling: Mapping[str, Any]) -> Question:
    """Ask for completions of all of these texts or token ids."""
    body = {
        "prompt": prompts,
        **sampling,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "add_special_tokens": True,  # to texts
    }
    known = [None if isinstance(prompt, str) else prompt for prompt in prompts]
    return Question("/v1/completions", body, lambda answer: list(answer["choices"]), known)


def ask_with_images(ids: TokenIds, images: Sequence[Any], sampling: Mapping[str, Any]) -> Question:
    """Ask for completions of token ids with one placeholder for each image."""
    body = {
        "token_ids": ids,
        "content_parts": [{"type": "image_url", "url": image_url(image)} for image in images],
        "sampling_params": dict(sampling),
        "return_token_ids": True,
    }
    return Question("/inference/v1/generate", body, _choices, [None])


def ask_in_chat(
    messages: Messages,
    images: Sequence[Any],
    sampling: Mapping[str, Any],
    template: Mapping[str, Any],
) -> Question:
    """Ask for completions of a conversation, which the server's chat template writes.

    Args:
        messages: the conversation.
        images: those of its image parts that have none.
        sampling: fields of a completion request.
        template: what is for the chat template.
    """
    body = {
        "messages": _with_urls(messages, images),
        **sampling,
        **template,
        "logprobs": sampling["logprobs"] is not None,
        "top_logprobs": sampling["logprobs"] or 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if not template.get("tools", True):
        del body["tools"]  # the server takes no empty list
    elif template.get("tools"):
        tools = [get_json_schema(tool) if callable(tool) else tool for tool in template["tools"]]
        # the prompt names them; calls are read by whoever asked
        body |= {"tools": tools, "tool_choice": "none"}
    return Question("/v1/chat/completions", body, _choices, [None])


def image_url(image: Any) -> str:
    """Return a PIL image as a data URL, without loss; a URL as it is.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(image, str) and image.startswith(("data:", "http://", "https://")):
        return image
    if not is_pil_image(image):
        raise ValueError(f"images: expected PIL images or URLs of images, got {shortened(image)}")
    return data_url(image)


def _with_urls(messages: Messages, images: Sequence[Any]) -> Messages:
    """Return the messages as the server takes them: images as URLs."""
    left = list(images)
    written = [dict(message) | _content(message, left) for message in messages]
    if left:
        raise ValueError(
            f"images: expected as many as there are parts {{'type': 'image'}} without an image in "
            f"the messages, got {len(left)} more"
        )
    return written


def _content(message: Mapping[str, Any], left: list[Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return {}
    return {"content": [_part(part, left) for part in content]}


def _part(part: Any, left: list[Any]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _IMAGE_PARTS:
        return part
    places = (kind, "image", "url", "path", "base64")
    image = next((part[place] for place in places if part.get(place) is not None), None)
    if image is None:
        if not left:
            raise ValueError("images: expected one for every image part of the messages, got less")
        image = left.pop(0)
    return {"type": "image_url", "image_url": {"url": image_url(image)}}


def _choices(answer: Any) -> Choices:
    """Return choices as a completion request has them, of one prompt's answer."""
    prompt = answer["prompt_token_ids"]
    return [
        choice | {"prompt_token_ids": prompt, "logprobs": _columns(choice["logprobs"])}
        for choice in answer["choices"]
    ]


def _columns(logprobs: Any) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    entries = logprobs["content"]
    return {
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {_token(top): top["logprob"] for top in entry["top_logprobs"]} for entry in entries
        ],
    }


def _token(entry: Mapping[str, Any]) -> str:
    return entry["token"] if "token" in entry else f"token_id:{entry['token_id']}"


def joined(
    extra: Mapping[str, Any], more: Mapping[str, Any], sampling: Mapping[str, Any]
) -> dict[str, Any]:
    """Return further fields of a request, which came in two ways.

    Raises:
        ValueError: one came twice, or has an argument of its own.
    """
    again = sorted((set(extra) & (set(sampling) | set(more))) | (set(more) & set(sampling)))
    if again:
        raise ValueError(f"generation_kwargs: {', '.join(again)} have arguments of their own")
    return {**extra, **more}


def in_order(questions: list[Question], answers: list[Any], n: int) -> Choices:
    """Return the choices of all answers, numbered through."""
    return [
        choice | {"index": first * n + choice["index"]}
        for first, (question, answer) in enumerate(zip(questions, answers, strict=True))
        for choice in question.choices(answer)
    ]
