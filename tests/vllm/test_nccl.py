"""What the transfer from GPU to GPU says to a server; the transfer itself needs two GPUs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from grpo_trainer.vllm import ServerError


class _Server:
    url = "http://127.0.0.1:8000"

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict]] = []
        self.fails = False

    def ask(self, method, path, body, timeout, stop):
        self.asked.append((path, body))
        if self.fails:
            raise ServerError(path)


@pytest.fixture
def sent(monkeypatch):
    from vllm.distributed.weight_transfer import nccl_engine

    names: list[list[str]] = []
    engine = nccl_engine.NCCLTrainerWeightTransferEngine
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: None)
    monkeypatch.setattr(
        engine, "_broadcast", lambda self, source, meta: names.append([name for name, _ in source])
    )
    monkeypatch.setattr(engine, "_post_send_sync", lambda self: None)
    return names


def test_updates(sent):
    """One group for all updates, and one description of the parameters."""
    from grpo_trainer.vllm.nccl import NCCLTransfer

    server, transfer = _Server(), NCCLTransfer(workers=2, port=51216, timeout=5.0)
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
    update = partial(transfer.send, server, lambda: iter(tensors.items()))
    update()
    joined, told = server.asked[0][1]["init_info"], server.asked[2][1]["update_info"]
    assert (joined["world_size"], joined["rank_offset"]) == (3, 1)
    assert (joined["master_address"], joined["master_port"]) == ("127.0.0.1", 51216)
    assert told["names"] == ["a", "b"] and told["shapes"] == [[2, 3], [4]]
    assert told["dtype_names"] == ["float32", "bfloat16"]
    join = ["/init_weight_transfer_engine"]
    steps = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    update()
    assert [path for path, _ in server.asked] == [*join, *steps, *steps]
    assert sent == [["a", "b"]] * 2
    server.fails = True
    with pytest.raises(ServerError):
        update()
