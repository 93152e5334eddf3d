"""The engines that generate, with the settings they are measured at."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.training.task import TrainingConfig

_BLOCK = 32  # tokens; vLLM on a CPU wants a multiple of it
MEMORY_SHARE = {"cpu": 0.1, "cuda": 0.3}  # vLLM's, of the device's memory
_CACHE = 256 << 20  # bytes of keys and values that are enough on a CPU
NOT_INSTALLED = "not measured: vLLM is not installed here; `make bench-vllm` installs it"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One way to generate."""

    name: str
    note: str
    sent: bool  # it has weights of its own, which it is sent
    server: bool = False
    settings: Callable[[TrainingConfig, str], dict[str, Any]]  # fields of GRPOConfig

    def absent(self) -> str | None:
        """Return why it cannot run here, or None."""
        missing = self.sent and importlib.util.find_spec("vllm") is None
        return NOT_INSTALLED if missing else None


def longest(config: TrainingConfig) -> int:
    """Return the number of tokens that an engine has room for in a sequence."""
    tokens = config.prompt_tokens + config.completion_tokens
    return tokens + -tokens % _BLOCK


def vllm_arguments(config: TrainingConfig, device: str) -> dict[str, Any]:
    """Return the arguments of the engine, the same for a colocated one and a server."""
    settings: dict[str, Any] = {"max_num_seqs": config.sequences}
    if device == "cpu":  # small and quick to start
        settings |= {"enforce_eager": True, "block_size": _BLOCK, "kv_cache_memory_bytes": _CACHE}
    return settings


def _continuous(config: TrainingConfig, device: str) -> dict[str, Any]:
    blocks = {"num_blocks": 4 * config.sequences, "max_batch_tokens": 8 * longest(config)}
    return {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": blocks,
    }


def _colocated(config: TrainingConfig, device: str) -> dict[str, Any]:
    return {
        "use_vllm": True,
        "vllm_max_model_length": longest(config),
        "vllm_gpu_memory_utilization": MEMORY_SHARE[device],
        "vllm_engine_kwargs": vllm_arguments(config, device),
    }


def _server(config: TrainingConfig, device: str, **more: Any) -> dict[str, Any]:
    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 240.0, **more}


ENGINES = (
    Engine(
        name="transformers",
        note="`generate` of transformers, with the policy itself",
        sent=False,
        settings=lambda config, device: {},
    ),
    Engine(
        name="transformers-continuous",
        note="transformers' continuous batching, likewise",
        sent=False,
        settings=_continuous,
    ),
    Engine(
        name="vllm-colocate",
        note="vLLM inside the training process",
        sent=True,
        settings=_colocated,
    ),
    Engine(
        name="vllm-server",
        note="a vLLM server on the same machine",
        sent=True,
        server=True,
        settings=_server,
    ),
    Engine(
        name="vllm-server-overlap",
        note="the same with overlap_generation: what is left of the wait",
        sent=True,
        server=True,
        settings=partial(_server, overlap_generation=True),
    ),
)
