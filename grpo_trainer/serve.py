"""``grpo-train serve``: a vLLM server that a trainer can sample from and send weights to."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from grpo_trainer.rollout.http import is_loopback
from grpo_trainer.rollout.vllm_params import MAX_LOGPROBS

_DESCRIPTION = (
    "Starts `vllm serve` for training with use_vllm and vllm_mode=server. Arguments that are not "
    "listed here are handed on to it. Both sides read an API key from VLLM_API_KEY."
)


class ServeCommand(NamedTuple):
    """A process to become."""

    words: list[str]
    environment: dict[str, str]
    warning: str | None


def serve_command(argv: Sequence[str]) -> ServeCommand:
    """What ``grpo-train serve`` with ``argv`` runs."""
    parser = argparse.ArgumentParser(
        prog="grpo-train serve", description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="Model folder or hub id.")
    parser.add_argument(
        "--host", default="127.0.0.1", help="Address to listen on. Default: this machine alone."
    )
    parser.add_argument("--port", default="8000", help="Port to listen on. Default: 8000.")
    known, rest = parser.parse_known_args(list(argv))
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", known.model]
    words += ["--host", known.host, "--port", known.port]
    # of the distribution that tokens are drawn from, after temperature and filters
    words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_LOGPROBS)]
    if torch.cuda.is_available():
        words += ["--weight-transfer-config", '{"backend": "nccl"}']
    environment = {"VLLM_SERVER_DEV_MODE": "1"}  # without it a server takes no weights
    return ServeCommand(words + rest, environment, _warning(known.host))


def _warning(host: str) -> str | None:
    if is_loopback(host):
        return None
    key = "" if os.environ.get("VLLM_API_KEY") else " and VLLM_API_KEY is not set"
    return (
        f"--host {host}: whoever reaches this port can replace the weights and make the server "
        f"read files; an API key guards the /v1 paths alone{key}. Use a closed network."
    )


def main(argv: Sequence[str]) -> None:
    """Becomes the server."""
    command = serve_command(argv)
    if importlib.util.find_spec("vllm") is None:
        print("grpo-train serve: error: vllm is not installed; install [vllm]", file=sys.stderr)
        raise SystemExit(2)
    if command.warning is not None:
        print(f"grpo-train serve: warning: {command.warning}", file=sys.stderr)
    sys.stderr.flush()
    os.execve(sys.executable, command.words, os.environ | command.environment)
