"""Sends weights from the trainer's GPU to the server's GPUs, with vLLM's own NCCL transfer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.base import WeightSource as VLLMWeightSource
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
)
from vllm.utils.network_utils import get_ip

from grpo_trainer.common import is_loopback
from grpo_trainer.engines import WeightSource
from grpo_trainer.vllm.http import ONCE, JsonServer

# requests of vLLM's transfer to the server, each at the path of its name -> its argument's field
_CALLS = {
    "init_weight_transfer_engine": "init_info",
    "start_weight_update": "",
    "update_weights": "update_info",
    "finish_weight_update": "weight_version",
}


class NCCLTransfer(VLLMWeightSource):
    """Joins the server's workers in one NCCL group, and provides weights to vLLM's transfer.

    They connect to ``port`` on this machine. Each request has a limit of ``timeout`` seconds.
    """

    def __init__(self, workers: int, port: int, timeout: float) -> None:
        self._workers = workers
        self._port = port
        self._timeout = timeout
        self._engine: Any = None
        self._weights: WeightSource = lambda: iter(())
        self._meta: list[ParamMeta] | None = None  # of the same parameters in every update

    def send(self, server: JsonServer, weights: WeightSource) -> None:
        self._weights = weights
        if self._engine is None:
            self._engine = self._join(server)
        self._engine.send_weights()

    def metadata(self) -> list[ParamMeta]:
        if self._meta is None:
            self._meta = [
                ParamMeta(name=name, dtype=value.dtype, shape=tuple(value.shape))
                for name, value in self
            ]
        return self._meta

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    def _join(self, server: JsonServer) -> Any:
        def call(name: str, *value: Any, **named: Any) -> None:
            body = dict(zip((_CALLS[name],), value, strict=False)) | named
            # the broadcast in parallel is done once
            server.ask("POST", f"/{name}", body, timeout=self._timeout, stop=ONCE)

        address = "127.0.0.1" if is_loopback(urlsplit(server.url).hostname or "") else get_ip()
        info = NCCLTrainerInitInfo(
            rank=0, master_address=address, master_port=self._port, world_size=self._workers + 1
        )
        client = SimpleNamespace(**{name: partial(call, name) for name in _CALLS})
        return NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=self)
