"""How weights reach a server: through files that both sides see, or from GPU to GPU by NCCL."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import save_file
from torch import Tensor

from grpo_trainer.common import is_loopback
from grpo_trainer.engines import WeightSource
from grpo_trainer.vllm.http import ONCE, JsonServer, ServerError

_FILE_BYTES = 1 << 30  # so much of the weights is in memory a second time
# what vLLM's transfer asks of the server, each at the path of its name -> field of its argument
_CALLS = {
    "init_weight_transfer_engine": "init_info",
    "start_weight_update": None,
    "update_weights": "update_info",
    "finish_weight_update": None,
}


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


class NCCLTransfer:
    """Joins the server's workers in one NCCL group, and is what vLLM's transfer reads weights from.

    They meet at ``port`` of this machine. One request may take ``timeout`` seconds.
    """

    def __init__(self, workers: int, port: int, timeout: float) -> None:
        from vllm.distributed.weight_transfer import nccl_engine

        self._vllm = nccl_engine
        self._workers = workers
        self._port = port
        self._timeout = timeout
        self._engine: Any = None
        self._weights: WeightSource = lambda: iter(())
        self._named: frozenset[str] = frozenset()
        self._meta: list[Any] | None = None  # what the policy consists of seldom changes

    def send(self, server: JsonServer, weights: WeightSource, named: frozenset[str]) -> None:
        """Send ``weights``; ``named`` are parameters that may not be the policy's."""
        if named != self._named:
            self._meta = None
        self._weights, self._named = weights, named
        if self._engine is None:
            self._engine = self._join(server)
        self._engine.send_weights()

    def metadata(self) -> list[Any]:
        if self._meta is None:
            self._meta = [
                self._vllm.ParamMeta(name=name, dtype=value.dtype, shape=tuple(value.shape))
                for name, value in self
            ]
        return self._meta

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    def _join(self, server: JsonServer) -> Any:
        from vllm.utils.network_utils import get_ip

        def call(name: str, value: Any = None) -> None:
            body = {} if value is None else {_CALLS[name]: value}
            # the broadcast beside it is made once
            server.ask("POST", f"/{name}", body, timeout=self._timeout, stop=ONCE)

        address = "127.0.0.1" if is_loopback(urlsplit(server.url).hostname or "") else get_ip()
        info = self._vllm.NCCLTrainerInitInfo(
            rank=0, master_address=address, master_port=self._port, world_size=self._workers + 1
        )
        client = SimpleNamespace(**{name: partial(call, name) for name in _CALLS})
        return self._vllm.NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=client, source=self
        )
