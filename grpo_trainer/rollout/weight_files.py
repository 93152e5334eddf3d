"""Weights through a folder that trainer and server both see, as safetensors files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from grpo_trainer.rollout.base import WeightSource
from grpo_trainer.rollout.http import JsonServer, ServerError

_FILE_BYTES = 1 << 30  # so much of the weights is in memory a second time


class FileTransfer:
    """Writes each version once, into a folder of its own; a restarted server reads it again.

    Args:
        folder: where; it is made if it is missing.
        timeout: seconds that the server may take to load.
    """

    keeps_a_copy = True

    def __init__(self, folder: Path, timeout: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # runs that share an output folder do not share this one
        self._folder = Path(tempfile.mkdtemp(prefix="run-", dir=folder)).resolve()
        self._timeout = timeout

    def send(self, server: JsonServer, weights: WeightSource, version: str) -> None:
        written = self._folder / version
        if not written.exists():
            unfinished = self._folder / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            for number, tensors in enumerate(_parts(weights())):
                save_file(tensors, unfinished / f"model-{number:05d}.safetensors")
                tensors.clear()  # or it would live as long as the next part is made
            for old in self._folder.iterdir():
                if old != unfinished:
                    shutil.rmtree(old)
            unfinished.rename(written)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(written)}}
        try:
            server.post("/collective_rpc", body, self._timeout)
        except ServerError as error:
            raise type(error)(f"{error} (does the server see the folder {written}?)") from error

    def expect_others(self) -> None: ...

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield dictionaries of about _FILE_BYTES in main memory, no two tensors on the same memory."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, value in weights:
        copied = value.detach().to("cpu", copy=True).contiguous()
        part[name] = copied
        size += copied.numel() * copied.element_size()
        if size >= _FILE_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part
