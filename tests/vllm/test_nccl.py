"""What the transfer from GPU to GPU says to a server; the transfer itself needs two GPUs."""

from __future__ import annotations

import pytest
import torch

from grpo_trainer.rollout import ServerError


class _Server:
    url = "http://127.0.0.1:8000"

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict]] = []
        self.fails = False

    def post(self, path, body, timeout):
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


def test_an_update(sent):
    from grpo_trainer.rollout.weight_nccl import NCCLTransfer

    server, transfer = _Server(), NCCLTransfer(workers=2, port=51216, timeout=5.0)
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
    transfer.send(server, lambda: iter(tensors.items()), "v1")
    joined, update = server.asked[0], server.asked[2]
    assert joined[0] == "/init_weight_transfer_engine"
    told = joined[1]["init_info"]
    assert told["world_size"] == 3 and told["master_port"] == 51216
    assert told["master_address"] == "127.0.0.1" and told["rank_offset"] == 1
    assert update[1]["update_info"]["names"] == ["a", "b"]
    assert update[1]["update_info"]["dtype_names"] == ["float32", "bfloat16"]
    assert update[1]["update_info"]["shapes"] == [[2, 3], [4]]
    steps = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert [path for path, _ in server.asked] == ["/init_weight_transfer_engine", *steps]
    transfer.send(server, lambda: iter(tensors.items()), "v2")
    assert [path for path, _ in server.asked[4:]] == steps  # one group for all updates
    assert sent == [["a", "b"]] * 2
    transfer.expect_others()
    transfer.send(server, lambda: iter({"c": torch.zeros(1)}.items()), "v2")
    assert sent.pop() == ["c"]
    del server.asked[7:]
    transfer.expect_others()
    server.fails = True
    with pytest.raises(ServerError):
        transfer.send(server, lambda: iter(tensors.items()), "v3")
    server.fails = False
    transfer.send(server, lambda: iter(tensors.items()), "v3")
    assert [path for path, _ in server.asked[8:]] == ["/init_weight_transfer_engine", *steps]
