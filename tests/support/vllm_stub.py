"""A stand-in for a vLLM server: it answers what a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]  # status, and JSON or bytes
KNOWN = ("seed", "stop_token_ids", "ignore_eos")  # fields that it names in its schemas
# of a server of weights in full precision, which takes no adapters
CONFIG = {
    "model_config": {"quantization": None},
    "lora_config": None,
    "aux_output_config": {"enable_return_routed_experts": False},
    "speculative_config": None,
}


class StubServer:
    """Completes every prompt with token 7 and its index, and remembers what it was asked.

    ``script`` has, by path, answers that come before the usual ones; a callable makes one, or
    returns None for the usual one.
    """

    def __init__(self, port: int = 0) -> None:
        self.asked: list[tuple[str, Any, Any]] = []  # path, body, Authorization
        self.script: dict[str, list[Answer | Callable[[], Answer | None]]] = {}
        self.version = "default"
        self.loaded: list[str] = []  # folders of weights
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub._serve(self, None)

            def do_POST(self) -> None:
                stub._serve(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.handle_error = lambda *args: None  # clients that gave up waiting
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.asked]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler, raw: bytes | None) -> None:
        body = json.loads(raw) if raw else None
        self.asked.append((handler.path, body, handler.headers.get("Authorization")))
        scripted = self.script.get(handler.path)
        entry = scripted.pop(0) if scripted else None
        reply = entry() if callable(entry) else entry
        status, answer = reply or self._usual(handler.path, body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _usual(self, path: str, body: Any) -> Answer:
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/collective_rpc":
            self.loaded.append(body["kwargs"]["weights_path"])
        schema = {
            "CompletionRequest": {"properties": dict.fromkeys(KNOWN)},
            "GenerateRequest": {"properties": {"content_parts": None}},
        }
        answers = {
            "/weight_info": {"weight_version": self.version},
            "/reset_prefix_cache?reset_running_requests=true": {"success": True},
            "/get_world_size": {"world_size": 1},
            "/server_info?config_format=json": {"vllm_config": CONFIG},
            "/openapi.json": {"components": {"schemas": schema}},
        }
        if path == "/v1/completions":
            return 200, {"choices": choices(body["prompt"], body["n"])}
        if path == "/inference/v1/generate":
            return 200, _with_images(body, self.version)
        if path == "/tokenize":
            return 200, {"tokens": ids_of(body["prompt"])}
        return 200, answers.get(path, {})


def _with_images(body: Any, version: str) -> dict[str, Any]:
    """Complete token ids, with an 8 for each image at their end."""
    entries = [{"token_id": token, "logprob": value} for token, value in ((7, -0.5), (0, -1.0))]
    prompt = body["token_ids"] + [8] * len(body["content_parts"])
    content = [entry | {"top_logprobs": [entry]} for entry in entries]
    spans = [{"version": version, "start": 0, "end": 2}]
    choice = {"token_ids": [7, 0], "logprobs": {"content": content}, "weight_versions": spans}
    made = [choice | {"index": i} for i in range(body["sampling_params"]["n"])]
    return {"prompt_token_ids": prompt, "choices": made[::-1]}


def choices(prompts: list[list[int]] | list[str], n: int) -> list[dict[str, Any]]:
    """Return a server's answer, last choice first."""
    made = [
        {
            "index": index,
            "token_ids": [7, index],
            "prompt_token_ids": ids_of(prompts[index // n]) if index % n == 0 else None,
            "logprobs": {"token_logprobs": [-0.5, -float(index)]},
        }
        for index in range(n * len(prompts))
    ]
    return made[::-1]


def ids_of(prompt: list[int] | str) -> list[int]:
    """Return as many tokens as the text has words."""
    return list(range(len(prompt.split()))) if isinstance(prompt, str) else prompt


def slowly(seconds: float) -> Callable[[], Answer]:
    def answer() -> Answer:
        time.sleep(seconds)
        return 200, {}

    return answer
