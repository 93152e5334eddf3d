"""Opening the images that rows name, where that is allowed."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from datasets import config
from datasets.utils.file_utils import xopen
from huggingface_hub import constants
from PIL import Image
from transformers.image_utils import load_image

from grpo_trainer.common import in_thread, shortened
from grpo_trainer.config import GRPOConfig

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")  # a chain of them is datasets' way
_SECONDS = 30.0  # for a URL to send all of an image
_BYTES = 2**28  # of a file that a URL sends


class ImageError(ValueError):
    """An image cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Media:
    """Which images rows may name.

    Args:
        remote: whether they may name URLs.
        folder: whose files they may name, beside those that the hub's datasets came with; None:
            any files.
    """

    remote: bool = True
    folder: str | None = None

    @classmethod
    def of(cls, args: GRPOConfig) -> Media:
        """Return what ``args`` allows."""
        return cls(remote=args.allow_remote_images is not False, folder=args.allowed_media_path)

    def open(self, source: Any) -> Image.Image:
        """Return an image in RGB: one that is open, or of bytes, a file, a URL or base64.

        Raises:
            ImageError: it cannot be read, whatever the reason is.
            ValueError: it may not be opened.
        """
        if isinstance(source, Mapping):  # a dataset's image that was not decoded
            data = source.get("bytes")
            source = source.get("path") if data is None else data
        if isinstance(source, str):
            self._check(source)
        try:
            return load_image(_found(source))
        except Exception as error:  # decoders raise whatever comes to them
            reason = shortened(str(error)) if str(error) else ""
            raise ImageError(f"{type(error).__name__} {reason}") from error

    def _check(self, source: str) -> None:
        if _REMOTE.match(source):
            if not self.remote:
                raise ValueError(
                    "allow_remote_images: expected True for images that are named by URLs, got "
                    f"False and {shortened(source)}"
                )
        elif self.folder is not None and os.path.isfile(source):
            path = Path(source).resolve()  # of what a link leads to
            folders = self.folder, constants.HF_HUB_CACHE, config.DOWNLOADED_DATASETS_PATH
            if not any(path.is_relative_to(Path(folder).resolve()) for folder in folders):
                raise ValueError(
                    f"allowed_media_path: expected files of images under {self.folder}, got "
                    f"{shortened(str(path))}"
                )


def distrust_rows(args: GRPOConfig) -> None:
    """Allow what rows of the hub's datasets need, and what ``args`` says: others wrote the rows."""
    args.allow_remote_images = bool(args.allow_remote_images)
    args.allowed_media_path = args.allowed_media_path or constants.HF_HUB_CACHE


def _found(source: Any) -> Any:
    """Return what :func:`load_image` takes, which would wait for a URL for any time."""
    if isinstance(source, str) and _REMOTE.match(source):
        read = in_thread(partial(_fetched, source), "image")
        return Image.open(io.BytesIO(read.result(_SECONDS)))
    return Image.open(io.BytesIO(source)) if isinstance(source, bytes) else source


def _fetched(url: str) -> bytes:
    if url.rpartition("::")[2].startswith("hf://"):  # of a dataset that is streamed
        with xopen(url, "rb") as file:
            return file.read(_BYTES)
    data = bytearray()
    # only http and https are known here, and where a server leads to is no other
    with httpx.stream("GET", url, timeout=_SECONDS, follow_redirects=True) as response:
        response.raise_for_status()
        for part in response.iter_bytes():
            data += part
            if len(data) > _BYTES:
                raise OSError(f"more than {_BYTES} bytes")
    return bytes(data)
