"""What a server of `grpo-train serve` passes on to vLLM."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
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


@pytest.mark.parametrize(
    "path", ["/pause", "/collective_rpc", "/metrics", "/v1/models", "/healthy"]
)
def test_the_key(path, monkeypatch):
    assert ask(path, JSON) == 200  # there is none
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert ask(path, JSON) == 401
    assert ask(path, JSON | {"authorization": "Bearer guessed"}) == 401
    assert ask(path, JSON | {"authorization": "Basic secret"}) == 401
    assert ask(path, JSON | {"authorization": "Bearer \u00e9"}) == 401
    assert ask(path, JSON | KEY) == 200
    assert ask(path, JSON | KEY, api_key=["other", "another"]) == 401  # given in its place
    assert ask(path, JSON | KEY, api_key=["other", "secret"]) == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "text/plain; application/json"}, 415),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
        (JSON | {"origin": "http://example.com"}, 403),
        (JSON | {"origin": "null"}, 403),
        (JSON | {"origin": "http://127.0.0.1:9000"}, 403),
        (JSON | {"origin": "https://127.0.0.1:8000"}, 403),
        (JSON | {"origin": "http://127.0.0.1:8000"}, 200),
        (JSON | {"host": "example.com:8000"}, 403),
        (JSON | {"host": "127.0.0.1.example.com"}, 403),
        (JSON | {"host": ""}, 403),
        (JSON | {"host": "[::1"}, 403),
        (JSON | {"host": "example.com", "origin": "http://example.com"}, 403),
        (JSON | {"host": "localhost:8000"}, 200),
        (JSON | {"host": "[::1]:8000"}, 200),
    ],
)
def test_what_a_page_in_a_browser_can_send(headers, status):
    assert ask(headers=headers) == status
    assert ask(headers=headers | KEY, api_key=["secret"]) == status


READ = {"method": "GET", "path": "/server_info"}
ROOT = {"root_path": "/base", "method": "GET", "api_key": ["secret"]}
FOREIGN = {"origin": "http://example.com"}
# an address that others reach has names of its own
SHOWN = {"host": "0.0.0.0"}
NAMED = JSON | KEY | {"host": "gpu-node:8000"}
SOCKET = {"path": "/v1/realtime", "kind": "websocket", "scheme": "ws"}


@pytest.mark.parametrize(
    ("scope", "headers", "status"),
    [
        ({"path": "/health", "method": "GET", "api_key": ["secret"]}, {}, 200),
        (ROOT | {"path": "/base/health"}, {}, 200),
        (ROOT | {"path": "/base/metrics"}, {}, 401),
        (READ, {}, 200),
        (READ, FOREIGN, 403),
        (READ | {"method": "OPTIONS"}, FOREIGN, 403),
        (READ, {"host": "example.com"}, 403),
        (SHOWN | {"api_key": ["secret"]}, NAMED, 200),
        (SHOWN, NAMED | {"origin": "http://gpu-node:8000"}, 200),
        (SHOWN, NAMED | FOREIGN, 403),
        (SOCKET, {}, 200),
        (SOCKET, FOREIGN, 403),
        (SOCKET | {"api_key": ["secret"]}, {}, 403),
        ({"kind": "lifespan"}, {}, 200),
    ],
)
def test_who_may_ask_what(scope, headers, status):
    assert ask(headers=headers, **scope) == status


def test_a_server_imports_little_for_it():
    heavy = ("torch", "transformers", "datasets", "accelerate", "httpx", "vllm")
    code = f"import sys, grpo_trainer.cli.guard; print([m for m in {heavy!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
