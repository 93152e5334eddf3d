"""A client of a server that answers what a test tells it to."""

from __future__ import annotations

import pytest

from grpo_trainer.vllm import VLLMClient, http


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_DELAY", 0.02)


@pytest.fixture
def make_client(stub, tmp_path):
    def make(**changes) -> VLLMClient:
        settings = {"connection_timeout": 5.0, "request_timeout": 5.0}
        client = VLLMClient(stub.url, **(settings | changes))
        client.init_communicator("cpu", folder=tmp_path / "weights")
        return client

    return make
