"""Weights to a server, through files that both sides see."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from grpo_trainer.engines import WeightSource
from grpo_trainer.vllm.http import JsonServer, ServerError

_FILE_BYTES = 1 << 30  # so much of the weights is in memory a second time


class FileTransfer:
    """Writes the weights into a folder for each update, and deletes those of the one before.

    The server may take ``timeout`` seconds to load them.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # runs that share an output folder do not share this one
        self._folder = Path(tempfile.mkdtemp(prefix="run-", dir=folder)).resolve()
        self._timeout = timeout

    def send(self, server: JsonServer, weights: WeightSource, named: frozenset[str]) -> None:
        for old in self._folder.iterdir():
            shutil.rmtree(old)
        # under a new name, of which no other machine remembers what was there
        written = tempfile.mkdtemp(dir=self._folder)
        for number, tensors in enumerate(_parts(weights())):
            save_file(tensors, f"{written}/model-{number:05d}.safetensors")
            tensors.clear()  # or it would live as long as the next part is made
        body = {"method": "reload_weights", "kwargs": {"weights_path": written}}
        try:
            server.ask("POST", "/collective_rpc", body, timeout=self._timeout)
        except ServerError as error:
            raise type(error)(f"{error} (does the server see the folder {written}?)") from error

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield dictionaries of about _FILE_BYTES in main memory, no two tensors on the same memory."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, value in weights:
        part[name] = value.detach().to("cpu", copy=True).contiguous()
        size += part[name].nbytes
        if size >= _FILE_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part
