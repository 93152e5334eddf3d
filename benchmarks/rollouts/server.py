"""A vLLM server for as long as it is measured."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rollouts.engines import MEMORY_SHARE, longest, vllm_arguments
from benchmarks.training.task import TrainingConfig, make_model, make_tokenizer

_COMMAND = "from grpo_trainer.cli.train import main; main()"


@contextmanager
def served(config: TrainingConfig, device: str, folder: Path) -> Iterator[int]:
    """Yield the port of ``grpo-train serve`` with the model of ``config``."""
    make_model(config).save_pretrained(folder / "model")
    make_tokenizer(config).save_pretrained(folder / "model")
    port = _free_port()
    log = folder / "server.txt"
    command = [sys.executable, "-c", _COMMAND, "serve", *_options(config, device, folder, port)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        yield port
    except Exception as error:
        error.add_note(f"the server said: {log.read_text()[-3000:]}")
        raise
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it has processes of its own
        process.wait()


def _options(config: TrainingConfig, device: str, folder: Path, port: int) -> list[str]:
    options: dict[str, Any] = {
        "model": folder / "model",
        "port": port,
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "max_model_len": longest(config),
        "gpu_memory_utilization": MEMORY_SHARE[device],
        **vllm_arguments(config, device),
    }
    words = []
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}")
        words += [] if value is True else [str(value)]
    return words


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
