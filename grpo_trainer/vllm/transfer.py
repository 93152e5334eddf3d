"""The half of VLLMClient that replaces the weights of the server, through files or by NCCL."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from grpo_trainer.engines import WeightSource, policy_weights
from grpo_trainer.vllm.http import JsonServer, RetryableError, ServerError

if TYPE_CHECKING:
    from grpo_trainer.vllm.nccl import NCCLTransfer

logger = logging.getLogger(__name__)

_FILE_BYTES = 1 << 30  # so much of the weights is in memory a second time


class FileTransfer:
    """Writes the weights into a folder for each update, and deletes those of the one before.

    Args:
        folder: where; it is made if it is missing.
        timeout: seconds that the server may take to load.
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
        copied = value.detach().to("cpu", copy=True).contiguous()
        part[name] = copied
        size += copied.numel() * copied.element_size()
        if size >= _FILE_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


class TakesWeights:
    """A server, and what it was sent.

    Args:
        group_port: port of this machine for weights that go from GPU to GPU.
        request_timeout: seconds that one request may take.
    """

    def __init__(self, server: JsonServer, group_port: int, request_timeout: float) -> None:
        self.server = server
        self.group_port = group_port
        self.request_timeout = request_timeout
        self._transfer: FileTransfer | NCCLTransfer | None = None
        self._version = ""  # of the weights that were sent last
        self._source: WeightSource | None = None  # of these
        # copies in main memory that replace those of the source, and where they were
        self._named: dict[str, tuple[Tensor, torch.device]] = {}
        self._named_is_new = False

    def get_world_size(self) -> int:
        """Return processes that hold the server's model."""
        return int(self.server.field(self.server.ask("GET", "/get_world_size"), "world_size"))

    def get_server_info(self) -> dict[str, Any]:
        """Return the server's configuration."""
        answer = self.server.ask("GET", "/server_info?config_format=json")
        return self.server.field(answer, "vllm_config")

    def init_communicator(
        self,
        device: torch.device | str | int = 0,
        way: str = "auto",
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        """Prepare for sending weights.

        Args:
            device: where they are.
            way: ``nccl``: from GPU to GPU, by vLLM's own transfer; ``file``: through a folder that
                the server sees, too; ``auto``: the first if device and server can.
            folder: for files. Default: one among the system's temporary files.

        Raises:
            ServerError: the server fails or refuses.
            ImportError: ``nccl`` without vLLM installed here.
        """
        self.close_communicator()
        if way == "auto":
            on_gpu = torch.cuda.is_available() and torch.device(device).type == "cuda"
            prepared = on_gpu and self.get_server_info().get("weight_transfer_config") is not None
            way = "nccl" if prepared else "file"
            logger.info("weights reach %s by %s", self.server.url, way)
        if way == "nccl":
            from grpo_trainer.vllm.nccl import NCCLTransfer  # imports vllm

            settings = (self.get_world_size(), self.group_port, self.request_timeout)
            self._transfer = NCCLTransfer(*settings)
        else:
            place = Path(folder or tempfile.gettempdir())
            self._transfer = FileTransfer(place, self.request_timeout)

    def update_weights(self, weights: WeightSource) -> None:
        """Replace the server's weights.

        Raises:
            ServerError: the server fails or refuses.
            ValueError: :meth:`init_communicator` was not called.
        """
        self._named.clear()
        self._source = weights
        self._send()

    def update_model_params(self, model: PreTrainedModel) -> None:
        """Replace the server's weights by those of ``model``, adapters merged in."""
        self.update_weights(lambda: policy_weights(model))

    def update_named_param(self, name: str, weights: Tensor) -> None:
        """Take a copy of one parameter of a checkpoint.

        All that were taken are sent together, before the next completion, at the latest by
        :meth:`reset_prefix_cache`: vLLM has some of them in one, such as those of queries, keys and
        values, and would leave the rest of it undefined. They replace those of the last
        :meth:`update_model_params`; without one every parameter has to be taken.
        """
        self._checked_transfer()
        self._named[name] = weights.detach().to("cpu", copy=True), weights.device
        self._named_is_new = True

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Send what :meth:`update_named_param` takes inside at the end."""
        yield
        self._send_named()

    def reset_prefix_cache(self) -> None:
        """Make the server forget keys, values and images of earlier prompts.

        Raises:
            ServerError: it fails, or requests are running.
        """
        self._send_named()
        self.server.wait(self.server.retrying()(self._reset))

    def close_communicator(self) -> None:
        """End the transfer of weights. The server keeps those that it has."""
        if self._transfer is not None:
            self._transfer.close()
        self._transfer, self._source, self._version = None, None, ""
        self._named.clear()
        self._named_is_new = False

    def _checked_transfer(self) -> FileTransfer | NCCLTransfer:
        if self._transfer is None:
            raise ValueError(
                "init_communicator: expected to be called before weights are sent, got none"
            )
        return self._transfer

    def _send_named(self) -> None:
        if self._named_is_new:
            self._send()

    def _send(self) -> None:
        transfer, self._named_is_new = self._checked_transfer(), False
        self._version = uuid.uuid4().hex  # which the server gets when it has all of them
        self.server.ask("POST", "/pause?mode=keep")
        transfer.send(self.server, self._newest, frozenset(self._named))
        self.server.wait(self.server.retrying()(self._reset))
        self.server.ask("POST", "/update_weight_version", {"new_version": self._version})
        self.server.ask("POST", "/resume")

    def _newest(self) -> Iterator[tuple[str, Tensor]]:
        named = dict(self._named)
        for name, value in self._source() if self._source is not None else ():
            kept, device = named.pop(name, (value, value.device))
            yield name, kept.to(device)
        for name, (kept, device) in named.items():
            yield name, kept.to(device)

    async def _reset(self) -> None:
        await self.server.answer("POST", "/reset_encoder_cache")
        answer = await self.server.answer("POST", "/reset_prefix_cache")
        if not self.server.field(answer, "success"):
            raise RetryableError(
                f"{self.server.url}/reset_prefix_cache: failed, requests are running"
            )

    async def _check_weights(self) -> None:
        if not self._version:
            return
        answer = await self.server.answer("GET", "/weight_info")
        if self.server.field(answer, "weight_version") != self._version:
            raise ServerError(
                f"{self.server.url}: expected the weights that were sent last, got others: the "
                "server was restarted, or somebody else sends it weights; a run goes on with "
                "resume_from_checkpoint"
            )
