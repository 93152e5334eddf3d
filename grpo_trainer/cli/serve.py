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
    "Starts `vllm serve` for training with use_vllm and vllm_mode=server. Arguments not listed "
    "here are passed on to it; --vllm_NAME is its --NAME. Both sides read an API key from "
    "VLLM_API_KEY; with one, every path except /health requires it. Requests from web pages of "
    "other sites are rejected."
)


def serve_command(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that ``grpo-train serve`` with ``argv`` runs."""
    parser = OneLineParser(prog="grpo-train serve", description=_DESCRIPTION)
    parser.add_argument("--model", required=True, help="Model folder or hub id.")
    parser.add_argument(
        "--host", default="127.0.0.1", help="Address to listen on. Default: only this machine."
    )
    parser.add_argument("--port", default="8000", help="Port to listen on. Default: 8000.")
    parser.add_argument(
        "--api-key",
        nargs="+",
        help="Replaces VLLM_API_KEY; other users see it in process listings.",
    )
    # the trainer's names for vLLM's options, such as --vllm_gpu_memory_utilization, work too
    known, rest = parser.parse_known_args([re.sub("^--vllm[_-]", "--", word) for word in argv])
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0":
        parser.error("VLLM_USE_RUST_FRONTEND: expected 0, since that front end has no middleware")
    has_key = any(known.api_key or [os.environ.get("VLLM_API_KEY")])
    if not has_key and not is_loopback(known.host):
        parser.error(
            f"--host {known.host}: expected VLLM_API_KEY to be set for an address that other "
            "machines can reach: without a key they can replace the weights and read files"
        )
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", known.model]
    # from the distribution that tokens are drawn from, after temperature and filters
    words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_LOGPROBS)]
    # ignore the model's own sampling settings; its max_new_tokens would cut every completion
    words += ["--generation-config", "vllm"]
    words += ["--enable-scale-out"]  # adds the path that takes images together with token ids
    if torch.cuda.is_available():
        words += ["--weight-transfer-config", '{"backend": "nccl"}']
    words += ["--api-key", *known.api_key] if known.api_key else []
    # after the arguments passed on, since vLLM uses the last one, abbreviated or not
    words += [*rest, "--host", known.host, "--port", known.port]
    # the last middleware is the first to see a request
    words += ["--middleware", f"{Guard.__module__}.{Guard.__qualname__}"]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # without it a server accepts no weights
        "PYTHONSAFEPATH": "1",  # modules in the working directory must not replace vLLM's
    }
    if {"--enable-lora", "--enable_lora"} & set(rest):
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # accept adapters, too
    if not is_loopback(known.host):
        print(
            f"grpo-train serve: warning: --host {known.host}: anyone with the API key can replace "
            "the weights and read files, and without --ssl-keyfile the key is sent unencrypted. "
            "Use a private network.",
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
