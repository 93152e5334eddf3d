"""What a vLLM server is asked, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from transformers.image_utils import is_pil_image
from transformers.utils import get_json_schema

from grpo_trainer.common import shortened
from grpo_trainer.data import data_url
from grpo_trainer.engines import Images, TokenIds

T = TypeVar("T")
Messages = list[dict[str, Any]]
Choices = list[dict[str, Any]]

_NEVER = -9999.0  # vLLM's stand-in for minus infinity, which JSON does not have
_ROUNDING = 1e-2  # by so much a log-probability may be above 0
_IMAGE_PARTS = ("image", "image_pil")  # kinds of a message's part, and where it has the image


@dataclass(frozen=True)
class Request:
    """A prompt for an engine that has a processor of its own."""

    ids: TokenIds  # as the policy takes it
    short_ids: TokenIds  # with one token per image
    images: tuple[Any, ...]

    def check(self, ids: TokenIds | None) -> None:
        """Raise ValueError unless the engine took the prompt for what the policy is trained on."""
        if self.images and list(ids or ()) != self.ids:
            raise ValueError(
                f"processing_class: expected a processor that writes an image as vLLM does, which "
                f"made {len(ids or ())} tokens of a prompt, got {len(self.ids)}"
            )


def requests_of(prompt_ids: list[TokenIds], images: Images) -> list[Request]:
    """Return the requests for prompts with ``images``, without what a model takes of them."""
    return [
        Request(ids, ids, ()) if one is None else Request(ids, one.shortened(ids), one.images)
        for ids, one in zip(prompt_ids, images or [None] * len(prompt_ids), strict=True)
    ]


def runs(prompts: Sequence[T]) -> list[tuple[T, int]]:
    """Count prompts that follow themselves: a group is one prompt, sampled n times."""
    return [(prompt, len(list(same))) for prompt, same in groupby(prompts)]


class Question(NamedTuple):
    """A request, and how its answer becomes choices of a completion request."""

    path: str
    body: dict[str, Any]
    choices: Callable[[Any], Choices]
    prompt_ids: list[TokenIds | None]  # of each prompt; None: only the server knows them


def completions_of(
    questions: Sequence[Question],
    answers: Sequence[Any],
    n: int,
    max_tokens: int,
    logprobs: int | None,
    vocab_size: int | None,
) -> dict[str, Any]:
    """Return the prompts' ids, and ``n`` completions per prompt in order, as
    :meth:`VLLMClient.generate` does; its other arguments are what was asked for.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: an answer is no such thing.
    """
    prompt_ids: list[TokenIds] = []
    token_ids, values, mask = [], [], []
    for question, answer in zip(questions, answers, strict=True):
        choices = sorted(question.choices(answer), key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(n * len(question.prompt_ids))):
            raise ValueError(f"{len(choices)} choices")
        for choice in choices:
            own = choice["prompt_token_ids"]
            if choice["index"] % n == 0:
                sent = question.prompt_ids[choice["index"] // n]
                prompt_ids.append(_checked_ids(own, vocab_size) if sent is None else sent)
            if own not in (None, prompt_ids[-1]):  # None: that of the choice before
                raise ValueError("the completion of another prompt")
            ids = _checked_ids(choice["token_ids"], vocab_size)
            if not 0 < len(ids) <= max_tokens:
                raise ValueError(f"{len(ids)} tokens, expected 1 to max_tokens = {max_tokens}")
            token_ids.append(ids)
            if logprobs is not None:
                numbers = _of_each(ids, choice["logprobs"]["token_logprobs"], "log-probabilities")
                values.append([_number(value) for value in numbers])
            if logprobs:
                likeliest = _of_each(ids, choice["logprobs"]["top_logprobs"], "sets of ids")
                mask.append([_checked_ids(_left(each), vocab_size) for each in likeliest])
    answer = {"prompt_ids": prompt_ids, "completion_ids": token_ids}
    answer["logprobs"] = None if logprobs is None else values
    return answer | {"sampling_mask": mask} if logprobs else answer


def _checked_ids(ids: TokenIds, vocab_size: int | None) -> TokenIds:
    end = math.inf if vocab_size is None else vocab_size
    wrong = [token for token in ids if type(token) is not int or not 0 <= token < end]
    if wrong:
        raise ValueError(f"token id {wrong[0]!r}, expected 0 <= id < {end}")
    return ids


def _of_each(ids: TokenIds, column: list[Any], what: str) -> list[Any]:
    if len(column) != len(ids):
        raise ValueError(f"{len(column)} {what} for {len(ids)} tokens")
    return column


def _left(likely: dict[str, float]) -> TokenIds:
    """Return the ids, which come as ``token_id:7``."""
    return [int(name.partition(":")[2]) for name, value in likely.items() if value > _NEVER]


def _number(value: float | None) -> float:
    """Return a log-probability, NaN for one that is unknown."""
    if value is None or value <= _NEVER:
        return math.nan
    if value > _ROUNDING:
        raise ValueError(f"log-probability {value}, expected at most 0")
    return float(value)


def checked_prompts(prompts: Any) -> list[Any]:
    """Return the prompts; raise ValueError unless they are texts, ids or messages, all of them."""
    several = isinstance(prompts, Sequence) and not isinstance(prompts, str) and len(prompts) > 0
    kinds = (_is_text, _are_ids, are_messages)
    if several and any(all(map(are_of_kind, prompts)) for are_of_kind in kinds):
        return [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    raise ValueError(
        "prompts: expected a list of texts, of lists of token ids, or of lists of messages, got "
        f"{shortened(prompts)}"
    )


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str)


def _are_ids(prompt: Any) -> bool:
    is_list = isinstance(prompt, list | tuple)
    return is_list and all(type(token) is int and token >= 0 for token in prompt)


def are_messages(prompt: Any) -> bool:
    """Return whether it is a conversation."""
    is_list = isinstance(prompt, list | tuple) and len(prompt) > 0
    return is_list and all(isinstance(message, Mapping) for message in prompt)


def checked_images(images: Any, count: int) -> list[list[Any]]:
    """Return the images of each of ``count`` prompts: None is none, one that is no list is one."""
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
    ids = [None if isinstance(prompt, str) else prompt for prompt in prompts]
    return Question("/v1/completions", body, lambda answer: list(answer["choices"]), ids)


def ask_with_images(ids: TokenIds, images: Sequence[Any], sampling: Mapping[str, Any]) -> Question:
    """Ask for completions of token ids with one placeholder for each image."""
    body = {
        "token_ids": ids,
        "content_parts": [{"type": "image_url", "url": image_url(image)} for image in images],
        "sampling_params": dict(sampling),
        "return_token_ids": True,
    }
    return Question("/inference/v1/generate", body, _choices, [None])


def ask_in_chat(messages: Messages, images: Sequence[Any], sampling: Mapping[str, Any]) -> Question:
    """Ask for completions of a conversation, which the server's chat template writes.

    ``images`` are those of its image parts that have none.
    """
    body = {
        "messages": _with_urls(messages, images),
        **sampling,
        "logprobs": sampling["logprobs"] is not None,
        "top_logprobs": sampling["logprobs"] or 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    tools = [
        get_json_schema(tool) if callable(tool) else tool for tool in body.pop("tools", None) or ()
    ]
    if tools:  # the server takes no empty list
        # the prompt names them; calls are read by whoever asked
        body |= {"tools": tools, "tool_choice": "none"}
    return Question("/v1/chat/completions", body, _choices, [None])


def image_url(image: Any) -> str:
    """Return a PIL image as a data URL, without loss; a URL as it is."""
    if isinstance(image, str) and image.startswith(("data:", "http://", "https://")):
        return image
    if not is_pil_image(image):
        raise ValueError(f"images: expected PIL images or URLs of images, got {shortened(image)}")
    return data_url(image)


def _with_urls(messages: Messages, images: Sequence[Any]) -> Messages:
    """Return the messages as the server takes them: images as URLs."""
    left = list(images)
    written = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            message = {**message, "content": [_part(part, left) for part in content]}
        written.append(message)
    if left:
        raise ValueError(
            f"images: expected as many as there are parts {{'type': 'image'}} without an image in "
            f"the messages, got {len(left)} more"
        )
    return written


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
            {top.get("token") or f"token_id:{top['token_id']}": top["logprob"] for top in likeliest}
            for likeliest in (entry["top_logprobs"] for entry in entries)
        ],
    }
