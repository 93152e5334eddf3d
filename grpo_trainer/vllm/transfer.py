"""The weights that a vLLM server answers with: sent to it, and sent again after a restart."""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from grpo_trainer.engines import WeightsLostError, WeightSource
from grpo_trainer.vllm.http import JsonServer, RetryableError, ServerError

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


logger = logging.getLogger(__name__)


class WeightTransfer(Protocol):
    """One way for weights to reach the server's workers."""

    keeps_a_copy: bool  # what was sent can be sent again, also when the policy has moved on

    def send(self, server: JsonServer, weights: WeightSource, version: str) -> None:
        """Replace the server's weights. Repeating it, with a server that was restarted, works."""
        ...

    def expect_others(self) -> None:
        """Other parameters are sent than before."""
        ...

    def close(self) -> None: ...


class ServedWeights:
    """What one client has sent to a server, by ``transfer``."""

    def __init__(self, server: JsonServer) -> None:
        self.transfer: WeightTransfer | None = None
        self._server = server
        self._source: WeightSource | None = None
        # copies in main memory that replace those of the source, and where they were
        self._named: dict[str, tuple[Tensor, torch.device]] = {}
        self._named_is_new = False
        self._version = ""
        self._updates = 0
        self._name = uuid.uuid4().hex[:12]  # of this client, in versions

    def send(self, weights: WeightSource) -> None:
        """Replace the server's weights, all of them.

        Raises:
            ServerError: the server fails or refuses.
            ValueError: there is no transfer.
        """
        self._check_transfer()
        self._named.clear()
        self._named_is_new = False
        self._source = weights
        self._send_anew()

    def keep(self, name: str, weights: Tensor) -> None:
        """Send a copy of one parameter before the server is asked for anything.

        Parameters are sent together: vLLM has some of them in one, such as those of queries, keys
        and values, and would leave the rest of it undefined.
        """
        self._check_transfer()
        if name not in self._named:
            self.transfer.expect_others()  # type: ignore[union-attr]
        self._named[name] = weights.detach().to("cpu", copy=True), weights.device
        self._named_is_new = True

    def send_named(self) -> None:
        """Send the parameters that were kept, among those that were sent before."""
        if not self._named_is_new:
            return
        self._named_is_new = False
        self._send_anew()

    def restore(self, in_background: bool = False) -> None:
        """Send the weights again if the server does not have them any more. One try.

        Raises:
            WeightsLostError: ``in_background``, and they are nowhere else.
        """
        if not self._version or self._served_version() == self._version:
            return
        assert self.transfer is not None  # it has sent them
        if in_background and not self.transfer.keeps_a_copy:
            raise WeightsLostError(f"{self._server.url} was restarted in mid-generation")
        logger.warning("%s was restarted: its weights are sent again", self._server.url)
        self._send()

    def reset_prefix_cache(self) -> None:
        """Make the server forget keys, values and images of earlier prompts. One try."""
        self._server.post("/reset_encoder_cache")
        if not self._server.field(self._server.post("/reset_prefix_cache"), "success"):
            raise RetryableError(
                f"{self._server.url}/reset_prefix_cache: failed, requests are running"
            )

    def close(self) -> None:
        """End the transfer; the server keeps the weights that it has."""
        if self.transfer is not None:
            self.transfer.close()
        self.transfer, self._source, self._version = None, None, ""
        self._named.clear()

    def _check_transfer(self) -> None:
        if self.transfer is None:
            raise ValueError(
                "init_communicator: expected to be called before weights are sent, got none"
            )

    def _send_anew(self) -> None:
        self._updates += 1
        self._version = f"{self._name}-{self._updates}"
        self._server.retrying(self._send)

    def _send(self) -> None:
        """Try once. The server has the version only if it has all of the weights: one that dies
        and comes back meanwhile has neither the mark of the start nor the version."""
        assert self.transfer is not None
        loading = f"{self._version}-loading"
        self._server.post("/pause?mode=keep")
        self._server.post("/update_weight_version", {"new_version": loading})
        self.transfer.send(self._server, self._all, self._version)
        self.reset_prefix_cache()
        if self._served_version() != loading:
            raise RetryableError(f"{self._server.url}: restarted while it got new weights")
        self._server.post("/update_weight_version", {"new_version": self._version})
        self._server.post("/resume")

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        left = dict(self._named)
        for name, value in self._source() if self._source is not None else ():
            yield (name, _moved(*left.pop(name))) if name in left else (name, value)
        for name, copied in left.items():
            yield name, _moved(*copied)

    def _served_version(self) -> str:
        return self._server.field(self._server.get("/weight_info"), "weight_version")


def _moved(value: Tensor, device: torch.device) -> Tensor:
    return value.to(device)
