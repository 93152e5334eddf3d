"""Requests to vLLM, and its server's answers."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np
from transformers.image_utils import is_pil_image

from grpo_trainer.common import shortened
from grpo_trainer.data import data_url
from grpo_trainer.engines import NEVER, Completions, Images, TokenIds, checked_ids


@dataclass(frozen=True)
class Request:
    """A prompt for an engine with its own processor."""

    ids: TokenIds  # for the policy
    short_ids: TokenIds  # with one token per image
    images: tuple[Any, ...]

    def check(self, ids: TokenIds | None) -> None:
        """Raise ValueError unless the engine read the prompt as the policy is trained on it."""
        if self.images and list(ids or ()) != self.ids:
            raise ValueError(
                f"processing_class: expected a processor that writes images as vLLM does, with "
                f"{len(ids or ())} tokens for a prompt, got {len(self.ids)}"
            )


def requests_of(prompt_ids: list[TokenIds], images: Images) -> list[Request]:
    """Return the requests for prompts with ``images``, without other model inputs."""
    return [
        Request(ids, ids, ()) if one is None else Request(ids, one.shortened(ids), one.images)
        for ids, one in zip(prompt_ids, images or [None] * len(prompt_ids), strict=True)
    ]


def joined(parts: list[list[Request]], rank: int) -> tuple[list[tuple[Request, int]], slice]:
    """Return the requests of processes that sample together, and the slice of ``rank``'s
    completions.

    Consecutive equal requests are merged, with their number: a group is one prompt, sampled n
    times.
    """
    counted = [(one, len(list(same))) for one, same in groupby(chain(*parts))]
    first = sum(map(len, parts[:rank]))
    return counted, slice(first, first + len(parts[rank]))


def completions_of(
    sent: Sequence[Sequence[TokenIds | None]],
    answers: Sequence[Any],
    fields: Mapping[str, Any],
    vocab_size: int | None,
    update_of: Callable[[str], int] | None = None,
) -> tuple[list[TokenIds], Completions]:
    """Return the prompts' ids, and ``n`` completions per prompt in order.

    Args:
        sent: the ids of each request's prompts; None: only the server knows them.
        answers: the server's answers, one per request.
        fields: of the requests.
        vocab_size: ids must be below it; None: unknown.
        update_of: returns the number of the update of a version of the weights. None: versions are
            not requested.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: an answer is invalid.
    """
    n, logprobs = fields["n"], fields["logprobs"]
    prompt_ids: list[TokenIds] = []
    token_ids: list[TokenIds] = []
    columns: list[tuple[list[Any], list[TokenIds]]] = []
    versions: list[list[int]] = []
    experts: list[str | None] = []
    for known, answer in zip(sent, answers, strict=True):
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(n * len(known))):
            raise ValueError(f"{len(choices)} choices")
        for choice in choices:
            own = (answer if "prompt_token_ids" in answer else choice)["prompt_token_ids"]
            if choice["index"] % n == 0:
                ids = known[choice["index"] // n]
                prompt_ids.append(checked_ids(own, vocab_size) if ids is None else ids)
            if own not in (None, prompt_ids[-1]):  # None: the same as the previous choice's
                raise ValueError("a completion of another prompt")
            token_ids.append(choice["token_ids"])
            experts.append(choice.get("routed_experts"))
            if logprobs is not None:
                columns.append(_columns(choice["logprobs"], logprobs > 0))
            if update_of is not None:
                spans = choice["weight_versions"]
                sizes = [(update_of(one["version"]), one["end"] - one["start"]) for one in spans]
                versions.append([update for update, size in sizes for _ in range(size)])
    completions = Completions(
        token_ids,
        None if logprobs is None else [values for values, _ in columns],
        [mask for _, mask in columns] if logprobs else None,
        None if update_of is None else versions,
        routed_experts=None if None in experts else [_array(text) for text in experts if text],
    )
    limits = {"max_tokens": fields["max_tokens"], "vocab_size": vocab_size}
    return prompt_ids, completions.checked(len(token_ids), **limits)


def _array(text: str) -> Any:
    """Return an array that vLLM sends as the base64 of a NumPy file."""
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def _columns(logprobs: Any, masks: bool) -> tuple[list[Any], list[TokenIds]]:
    """Return each token's log-probability and, with ``masks``, the ids that filters kept."""
    if "content" in logprobs:
        entries = logprobs["content"]
        numbers = [entry["logprob"] for entry in entries]
        likeliest = [
            {top.get("token") or top["token_id"]: top["logprob"] for top in entry["top_logprobs"]}
            for entry in entries
        ]
    else:  # of a completion request
        numbers, likeliest = logprobs["token_logprobs"], logprobs.get("top_logprobs")
    if not masks:
        return numbers, []
    # ids come as token_id:7 or 7
    return numbers, [
        [int(str(token).rpartition(":")[2]) for token, value in each.items() if value > NEVER]
        for each in likeliest
    ]


def checked_prompts(prompts: Any) -> list[Any]:
    """Return the prompts; raise ValueError unless all of them are texts, or all token ids."""
    if isinstance(prompts, Sequence) and not isinstance(prompts, str) and len(prompts) > 0:
        if all(isinstance(prompt, str) for prompt in prompts):
            return list(prompts)
        if all(map(_are_ids, prompts)):
            return [list(prompt) for prompt in prompts]
    raise ValueError(
        f"prompts: expected a list of texts or of lists of token ids, got {shortened(prompts)}"
    )


def _are_ids(prompt: Any) -> bool:
    is_list = isinstance(prompt, list | tuple)
    return is_list and all(type(token) is int and token >= 0 for token in prompt)


def checked_images(images: Any, count: int) -> list[list[Any]]:
    """Return a list of images for each of ``count`` prompts."""
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


def image_url(image: Any) -> str:
    """Return a PIL image as a lossless data URL, or a URL unchanged."""
    if isinstance(image, str) and image.startswith(("data:", "http://", "https://")):
        return image
    if not is_pil_image(image):
        raise ValueError(f"images: expected PIL images or URLs of images, got {shortened(image)}")
    return data_url(image)
