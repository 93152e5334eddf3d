"""What a server of `grpo-train serve` passes on to vLLM."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from grpo_trainer.cli.guard import Guard

JSON = {"content-type": "application/json"}
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def ask(
    path: str = "/pause",
    headers: dict[str, str] | None = None,
    method: str = "POST",
    host: str = "127.0.0.1",
    api_key: list[str] | None = None,
    kind: str = "http",
    **scope,
) -> int:
    """Return the status of the answer; 200 is that of vLLM."""
    sent = []

    async def vllm(scope, receive, send) -> None:
        await send({"type": f"{kind}.response.start", "status": 200, "headers": []})

    async def send(message) -> None:
        sent.append(message)

    state = SimpleNamespace(args=SimpleNamespace(host=host, api_key=api_key))
    fields = {"host": "127.0.0.1:8000"} | (headers or {})
    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
        "app": SimpleNamespace(state=state),
    } | scope
    if kind == "websocket":
        del scope["method"]
    asyncio.run(Guard(vllm)(scope, None, send))
    if sent[0]["type"] == "websocket.close":
        return 403
    if sent[0]["status"] != 200:
        assert json.loads(sent[1]["body"])["error"]
    return sent[0]["status"]


def test_the_key(monkeypatch):
    assert ask("/pause", JSON) == 200  # there is none
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    for path in ("/pause", "/metrics", "/healthy"):
        assert ask(path, JSON) == 401
        for wrong in ("Bearer guessed", "Basic secret", "Bearer \u00e9"):
            assert ask(path, JSON | {"authorization": wrong}) == 401
        assert ask(path, JSON | KEY) == 200
        assert ask(path, JSON | KEY, api_key=["other", "another"]) == 401  # given in its place
        assert ask(path, JSON | KEY, api_key=["other", "secret"]) == 200


KEPT = {"api_key": ["secret"]}
READ = {"method": "GET", "path": "/server_info"}
FOREIGN = {"origin": "http://example.com"}
# an address that others reach has names of its own
SHOWN = {"host": "0.0.0.0"}
NAMED = JSON | KEY | {"host": "gpu-node:8000"}
SOCKET = {"path": "/v1/realtime", "kind": "websocket", "scheme": "ws"}


@pytest.mark.parametrize(
    ("scope", "headers", "status"),
    [
        ({}, {}, 415),
        ({}, {"content-type": "text/plain; application/json"}, 415),
        ({}, {"content-type": "Application/JSON; charset=utf-8"}, 200),
        ({}, JSON | FOREIGN, 403),
        ({}, JSON | {"origin": "null"}, 403),
        ({}, JSON | {"origin": "http://127.0.0.1:9000"}, 403),
        ({}, JSON | {"origin": "https://127.0.0.1:8000"}, 403),
        ({}, JSON | {"origin": "http://127.0.0.1:8000"}, 200),
        ({}, JSON | {"host": "127.0.0.1.example.com"}, 403),
        ({}, JSON | {"host": ""}, 403),
        ({}, JSON | {"host": "[::1"}, 403),
        ({}, JSON | {"host": "example.com"} | FOREIGN, 403),
        (KEPT, JSON | KEY | {"host": "example.com"}, 403),
        ({}, JSON | {"host": "localhost:8000"}, 200),
        ({}, JSON | {"host": "[::1]:8000"}, 200),
        (KEPT | {"path": "/base/health", "root_path": "/base", "method": "GET"}, {}, 200),
        (KEPT | {"path": "/base/metrics", "root_path": "/base", "method": "GET"}, {}, 401),
        (READ, {}, 200),
        (READ, FOREIGN, 403),
        (READ | {"method": "OPTIONS"}, FOREIGN, 403),
        (SHOWN | KEPT, NAMED, 200),
        (SHOWN, NAMED | FOREIGN, 403),
        (SOCKET, {}, 200),
        (SOCKET, FOREIGN, 403),
        (SOCKET | KEPT, {}, 403),
        ({"kind": "lifespan"}, {}, 200),
    ],
)
def test_who_may_ask_what(scope, headers, status):
    assert ask(headers=headers, **scope) == status
