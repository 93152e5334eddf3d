"""Checks on each request to a ``grpo-train serve`` server, before vLLM sees it.

vLLM's own API key guards only the inference paths. The paths that pause the server, call its
workers' methods and replace its weights answer anyone, including web pages in a local browser.
``vllm serve --middleware`` imports this module into the server, so it imports nothing heavy.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from grpo_trainer.common import is_loopback

Scope = Mapping[str, Any]
Call = Callable[..., Awaitable[Any]]

_FOR_EVERYBODY = "/health"  # whether the server is up
_READING = ("GET", "HEAD", "OPTIONS")
_POLICY_VIOLATION = 1008  # code of a websocket's end


class Guard:
    """ASGI middleware: requires the API key, and rejects what pages of other origins can send.

    It uses the key and the address that vLLM was started with.
    """

    def __init__(self, app: Call) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Call, send: Call) -> None:
        refusal = _refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            status, reason = refusal
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            body = json.dumps({"error": reason}).encode()
            await send({"type": "http.response.body", "body": body})


def _refusal(scope: Scope) -> tuple[int, str] | None:
    """Return the status and the reason if a request is rejected."""
    args = scope["app"].state.args  # of vLLM
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    host = headers.get("host", "")
    # another site's name can resolve to this machine (DNS rebinding)
    if is_loopback(args.host) and not is_loopback(_hostname(host)):
        return 403, f"Host: expected localhost or a loopback address, got {host!r}"
    scheme = "https" if scope["scheme"] in ("https", "wss") else "http"
    if headers.get("origin", f"{scheme}://{host}") != f"{scheme}://{host}":
        return 403, f"Origin: expected {scheme}://{host} or none"
    if not _has_key(scope, headers, args):
        return 401, "Authorization: expected `Bearer KEY` with the server's VLLM_API_KEY"
    sent = headers.get("content-type", "").partition(";")[0].strip().lower()
    # a page can post other types to any origin without a preflight request (CORS)
    if scope.get("method", "GET") not in _READING and sent != "application/json":
        return 415, f"Content-Type: expected application/json, got {sent!r}"
    return None


def _has_key(scope: Scope, headers: Mapping[str, str], args: Any) -> bool:
    keys = [key for key in args.api_key or [os.environ.get("VLLM_API_KEY")] if key]  # as vLLM does
    if not keys or scope["path"].removeprefix(scope.get("root_path", "")) == _FOR_EVERYBODY:
        return True
    scheme, _, given = headers.get("authorization", "").partition(" ")
    right = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(right)


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
