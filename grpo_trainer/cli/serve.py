"""``grpo-train serve``: a vLLM server that a trainer can sample from and send weights to."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence

import torch

from grpo_kernels.tools import OneLineParser, install_command
from grpo_trainer.cli.guard import Guard
from grpo_trainer.common import is_loopback
from grpo_trainer.engines import MAX_LOGPROBS

_DESCRIPTION = (
    "Starts `vllm serve` for training with use_vllm and vllm_mode=server. Arguments that are not "
    "listed here are handed on to it; --vllm_NAME is its --NAME. Both sides read an API key from "
    "VLLM_API_KEY; with one, all paths but /health ask for it. Requests of web pages from "
    "elsewhere are refused."
)


def serve_command(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words and the environment of what ``grpo-train serve`` with ``argv`` runs."""
    parser = OneLineParser(prog="grpo-train serve", description=_DESCRIPTION)
    parser.add_argument("--model", required=True, help="Model folder or hub id.")
    parser.add_argument(
        "--host", default="127.0.0.1", help="Address to listen on. Default: this machine alone."
    )
    parser.add_argument("--port", default="8000", help="Port to listen on. Default: 8000.")
    parser.add_argument(
        "--api-key", nargs="+", help="In place of VLLM_API_KEY; other users see it among processes."
    )
    # the trainer's names of vLLM's options, such as --vllm_gpu_memory_utilization, work too
    known, rest = parser.parse_known_args([re.sub("^--vllm[_-]", "--", word) for word in argv])
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0":
        parser.error("VLLM_USE_RUST_FRONTEND: expected 0: that front end has no middleware")
    has_key = any(known.api_key or [os.environ.get("VLLM_API_KEY")])
    if not has_key and not is_loopback(known.host):
        parser.error(
            f"--host {known.host}: expected VLLM_API_KEY to be set with an address that other "
            "machines reach: without a key they can replace the weights and have files read"
        )
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", known.model]
    # of the distribution that tokens are drawn from, after temperature and filters
    words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_LOGPROBS)]
    # none of the model's own sampling; its max_new_tokens would cut every completion
    words += ["--generation-config", "vllm"]
    words += ["--enable-scale-out"]  # has the path that takes images beside token ids
    if torch.cuda.is_available():
        words += ["--weight-transfer-config", '{"backend": "nccl"}']
    words += ["--api-key", *known.api_key] if known.api_key else []
    # behind what was handed on, since vLLM takes the last, abbreviated or not
    words += [*rest, "--host", known.host, "--port", known.port]
    # the last middleware is the first to see a request
    words += ["--middleware", f"{Guard.__module__}.{Guard.__qualname__}"]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # without it a server takes no weights
        "PYTHONSAFEPATH": "1",  # no module of the working directory replaces one of vLLM's
    }
    if {"--enable-lora", "--enable_lora"} & set(rest):
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # it takes adapters, too
    if not is_loopback(known.host):
        print(
            f"grpo-train serve: warning: --host {known.host}: whoever has the API key can replace "
            "the weights and have files read, and without --ssl-keyfile it crosses the network as "
            "it is. Use a closed network.",
            file=sys.stderr,
        )
    return words, environment


def main(argv: Sequence[str]) -> None:
    """Become the server."""
    words, environment = serve_command(argv)
    if importlib.util.find_spec("vllm") is None:
        missing = f"vllm is not installed; {install_command('vllm')}"
        OneLineParser(prog="grpo-train serve").error(missing)
    sys.stderr.flush()
    os.execve(sys.executable, words, os.environ | environment)
