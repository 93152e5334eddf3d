"""Images of prompts: where they may come from, opening them, and a model's inputs."""

from __future__ import annotations

import base64
import copy
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from datasets import config
from datasets.utils.file_utils import xopen
from huggingface_hub import constants
from PIL import Image
from torch import Tensor
from torch.nn import functional
from transformers.image_utils import load_image

from grpo_trainer.common import in_thread, shortened
from grpo_trainer.config import GRPOConfig

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")  # datasets also accepts chains of URLs
_SECONDS = 30.0  # time limit for a download
_BYTES = 2**28  # size limit for a download


class ImageError(ValueError):
    """An image cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Media:
    """Which images rows may name.

    Args:
        remote: whether they may name URLs.
        folder: files under it may be named, in addition to files of the hub's datasets; None: any
            file.
    """

    remote: bool = True
    folder: str | None = None

    @classmethod
    def of(cls, args: GRPOConfig) -> Media:
        """Return the Media that ``args`` allows."""
        return cls(remote=args.allow_remote_images is not False, folder=args.allowed_media_path)

    def open(self, source: Any) -> Image.Image:
        """Return an RGB image from an open image, bytes, a file, a URL or base64.

        Raises:
            ImageError: it cannot be read, for any reason.
            ValueError: it may not be opened.
        """
        if isinstance(source, Mapping):  # a dataset's image, not decoded
            data = source.get("bytes")
            source = source.get("path") if data is None else data
        if isinstance(source, str):
            self._check(source)
        try:
            if isinstance(source, str) and _REMOTE.match(source):
                # load_image would wait without a time limit
                source = in_thread(partial(_fetched, source), "image").result(_SECONDS)
            if isinstance(source, bytes):
                source = Image.open(io.BytesIO(source))
            return load_image(source)
        except Exception as error:  # decoders raise all kinds of errors
            reason = shortened(str(error)) if str(error) else ""
            raise ImageError(f"{type(error).__name__} {reason}") from error

    def _check(self, source: str) -> None:
        if _REMOTE.match(source):
            if not self.remote:
                raise ValueError(
                    "allow_remote_images: expected True for images given as URLs, got "
                    f"False and {shortened(source)}"
                )
        elif self.folder is not None and os.path.isfile(source):
            path = Path(source).resolve()  # follows links
            folders = self.folder, constants.HF_HUB_CACHE, config.DOWNLOADED_DATASETS_PATH
            if not any(path.is_relative_to(Path(folder).resolve()) for folder in folders):
                raise ValueError(
                    f"allowed_media_path: expected image files under {self.folder}, got "
                    f"{shortened(str(path))}"
                )


def distrust_rows(args: GRPOConfig) -> None:
    """Limit the images of hub datasets, which others wrote, to their own files and to ``args``."""
    args.allow_remote_images = bool(args.allow_remote_images)
    args.allowed_media_path = args.allowed_media_path or constants.HF_HUB_CACHE


def _fetched(url: str) -> bytes:
    if url.rpartition("::")[2].startswith("hf://"):  # from a streamed dataset
        with xopen(url, "rb") as file:
            return file.read(_BYTES)
    data = bytearray()
    # only http and https are supported here, also for redirects
    with httpx.stream("GET", url, timeout=_SECONDS, follow_redirects=True) as response:
        response.raise_for_status()
        for part in response.iter_bytes():
            data += part
            if len(data) > _BYTES:
                raise OSError(f"more than {_BYTES} bytes")
    return bytes(data)


IMAGE_COLUMNS = ("images", "image")  # several images, or one
PROMPT_COLUMNS = ("prompt", *IMAGE_COLUMNS)  # the columns that the model sees
_SOURCES = ("image", "url", "path", "base64")  # keys of an image part of a message
# pixel formats that PNG supports
_PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
_PER_TOKEN = "token_type_ids"  # inputs whose names end like this have a value per token


@dataclass(frozen=True)
class ImageInputs:
    """The images of a prompt, and the model inputs in addition to token ids.

    The prompt may be followed by the turns of a conversation with more images. Two instances are
    equal if their images are. ``inputs`` exist without images as well: some models need the type
    of each token.
    """

    images: tuple[Image.Image, ...]
    inputs: dict[str, Tensor] = field(compare=False)  # from the processor, for this prompt
    short_ids: list[int]  # the prompt with one token per image, for vLLM
    length: int  # tokens of the prompt for the model

    def shortened(self, ids: list[int]) -> list[int]:
        """Return ``ids``, which begin with the prompt, with one token per image."""
        return self.short_ids + ids[self.length :]

    def followed(self, ids: list[int], other: ImageInputs, start: int) -> ImageInputs:
        """Return the images of ``ids``, which begin with the prompt, followed by the images of
        ``other`` after its first ``start`` tokens, which hold no image."""
        inputs = {}
        for name in {**self.inputs, **other.inputs}:
            first, second = (each.inputs.get(name) for each in (self, other))
            if name.endswith(_PER_TOKEN):
                rest = None if second is None else second[:, start:]
                inputs[name] = torch.cat(
                    [_widened(first, len(ids)), _widened(rest, other.length - start)], dim=1
                )
            else:
                inputs[name] = _concatenated([part for part in (first, second) if part is not None])
        return ImageInputs(
            self.images + other.images,
            inputs,
            self.shortened(ids) + other.short_ids[start:],
            len(ids) + other.length - start,
        )


def has_images(images: Sequence[ImageInputs | None] | None) -> bool:
    """Return whether any of these prompts has images."""
    return any(one is not None and one.images for one in images or ())


def model_inputs(
    images: Sequence[ImageInputs | None],  # B
    lengths: Sequence[int],
    width: int,
    device: torch.device,
    left: bool = False,
) -> dict[str, Tensor]:
    """Join the model inputs, except ids, of B rows of ``lengths`` tokens, under the model's names.

    Inputs per token are padded to (B, width), with padding on the left if ``left``, else on the
    right. The others are joined along their first dimension, the images.
    """
    names = dict.fromkeys(name for one in images if one is not None for name in one.inputs)
    joined = {}
    for name in names:
        parts = [None if one is None else one.inputs.get(name) for one in images]
        if name.endswith(_PER_TOKEN):
            rows = [
                _widened(part, width, width - length if left else 0)
                for part, length in zip(parts, lengths, strict=True)
            ]
            joined[name] = torch.cat(rows).to(device)
        else:
            joined[name] = _concatenated([part for part in parts if part is not None]).to(device)
    return joined


def open_images(row: dict[str, Any], media: Media | None = None) -> dict[str, Any]:
    """Return a copy of ``row`` with its images opened and placed in its prompt.

    Images are parts ``{"type": "image", "image": ...}`` of the prompt's messages, or are in the
    columns ``image`` or ``images``. Images of columns fill the image parts that have no image, or,
    if there are none, go before the user's first message. A prompt without images is unchanged,
    except that keys with the value None are removed from its parts: a dataset's rows have all keys
    in every part, and templates may check for them. ``media`` limits where images may come from;
    None: anywhere.

    Raises:
        ImageError: an image cannot be read.
        ValueError: an image's source is not allowed, the prompt of a row with images is not a list
            of messages, both columns have images, or the numbers of places and images differ.
    """
    media = media or Media()
    opened = copy.copy(row)
    columns: list[list[Image.Image]] = []  # columns with images
    for name in IMAGE_COLUMNS:
        value: Any = row.get(name)
        several = isinstance(value, list | tuple)
        sources = [] if value is None else list(value) if several else [value]
        if images := [_open(source, media, row, name) for source in sources]:
            opened[name] = images if several else images[0]
            columns.append(images)
    if "prompt" in row:
        opened["prompt"] = _with_images(row, columns, media)
    return opened


def _with_images(row: Mapping[str, Any], columns: list[list[Image.Image]], media: Media) -> Any:
    """Return the prompt of ``row`` with its images and those of ``columns``."""
    prompt = row["prompt"]
    if len(columns) > 1:
        raise ValueError(
            f"images: expected one column with images, got {' and '.join(IMAGE_COLUMNS)} in "
            f"{_named(row)}; remove one of the columns from the dataset"
        )
    images = columns[0] if columns else []
    if not images and not any(image_parts(prompt)):
        has_none = any(value is None for part in parts_of(prompt) for value in part.values())
        return in_blocks(prompt) if has_none else prompt
    if not isinstance(prompt, list):
        raise ValueError(
            "prompt: expected messages in a row with images, got "
            f"{'none' if prompt is None else 'text'} in {_named(row)}"
        )
    messages = in_blocks(prompt)
    places = [part for part in image_parts(messages) if image_source(part) is None]
    if images and not places:
        user = next((one for one in messages if one["role"] == "user"), messages[0])
        places = [{"type": "image"} for _ in images]
        user["content"] = [*places, *(user["content"] or [])]
    if len(places) != len(images):
        raise ValueError(
            f"images: expected {len(places)}, one for each place in the messages, got "
            f"{len(images)} in {_named(row)}"
        )
    for part in image_parts(messages):
        if image_source(part) is not None:
            part["image"] = _open(image_source(part), media, row, "prompt")
    for place, image in zip(places, images, strict=True):
        place["image"] = image
    return messages


def images_of(prompt: Any) -> tuple[Image.Image, ...]:
    """Return the images in the messages of a prompt that :func:`open_images` made."""
    return tuple(part["image"] for part in image_parts(prompt))


def data_url(image: Image.Image) -> str:
    """Return an image as a data URL, lossless for models."""
    buffer = io.BytesIO()
    image = image if image.mode in _PNG_MODES else image.convert("RGB")
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def image_parts(prompt: Any) -> Iterator[dict[str, Any]]:
    """Yield the image parts in the messages of ``prompt``."""
    for part in parts_of(prompt):
        if isinstance(part, dict) and part.get("type") == "image":
            yield part


def parts_of(prompt: Any) -> Iterator[Any]:
    """Yield the parts in the messages of ``prompt``."""
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from content if isinstance(content, list) else ()


def content_blocks(content: Any) -> Any:
    """Return a message's text and image parts without unused keys, which a dataset's rows have."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return content
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def in_blocks(messages: Any) -> list[Any]:
    """Return messages with parts as their content: not every processor accepts plain text."""
    return [{**message, "content": content_blocks(message.get("content"))} for message in messages]


def image_source(part: Mapping[str, Any]) -> Any:
    """Return the source of the image of a message part, or the image; None if it has none."""
    return next((part[name] for name in _SOURCES if part.get(name) is not None), None)


def _open(source: Any, media: Media, row: Mapping[str, Any], column: str) -> Image.Image:
    try:
        return media.open(source)
    except ImageError as error:
        raise ImageError(
            "images: expected images, paths or URLs of images, got one that cannot be read in "
            f"{column!r} of {_named(row)}: {error}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{error} in {column!r} of {_named(row)}") from error


def _named(row: Mapping[str, Any]) -> str:
    number = getattr(row, "number", None)  # its number in the dataset
    return f"{'the row' if number is None else f'row {number},'} {shortened(dict(row))}"


def _widened(part: Tensor | None, width: int, before: int = 0) -> Tensor:  # (1, width)
    """Put values of tokens after ``before`` zeros, and pad with zeros."""
    if part is None:
        return torch.zeros(1, width, dtype=torch.int64)
    return functional.pad(part, (before, width - before - part.shape[1]))


def _concatenated(parts: list[Tensor]) -> Tensor:
    """Join along the first dimension; other dimensions, such as an image's tiles, may differ."""
    sizes = torch.tensor([part.shape[1:] for part in parts]).amax(0).tolist()
    padded = []
    for part in parts:
        missing = [most - size for most, size in zip(sizes, part.shape[1:], strict=True)]
        padded.append(functional.pad(part, [n for size in reversed(missing) for n in (0, size)]))
    return torch.cat(padded)
