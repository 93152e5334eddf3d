"""Generation, weight updates and the rest of a training step, by the engine that generates.

The numbers are those that the trainer logs of itself. Each engine runs in a process of its own,
since it changes its threads and random numbers.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.child import ask
from benchmarks.conftest import DEVICE, Session
from benchmarks.measure import attempt
from benchmarks.results import Row
from benchmarks.training.task import SIZES, TrainingConfig, make_model, make_tokenizer
from benchmarks.training.trainers import Job, build, precision

_STEPS = 3
_LONGEST = 600.0  # seconds of an engine that starts and trains a few steps
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine share the cores
}
_BLOCK = 32  # tokens; vLLM on a CPU wants a multiple of it
_MEMORY_SHARE = {"cpu": 0.1, "cuda": 0.3}  # vLLM's, of the device's memory
_CACHE = 256 << 20  # bytes of keys and values that are enough on a CPU
_PROFILE = "profiling/"
_WARM_UP = 2  # steps: in the first one weights are sent that are no update
_SERVE = "from grpo_trainer.cli.train import main; main()"


def _longest(config: TrainingConfig) -> int:
    """Return the number of tokens that an engine has room for in a sequence."""
    tokens = config.prompt_tokens + config.completion_tokens
    return tokens + -tokens % _BLOCK


def _vllm_arguments(config: TrainingConfig, device: str) -> dict[str, Any]:
    """Return the arguments of the engine, the same for a colocated one and a server."""
    settings: dict[str, Any] = {"max_num_seqs": config.sequences}
    if device == "cpu":  # small and quick to start
        settings |= {"enforce_eager": True, "block_size": _BLOCK, "kv_cache_memory_bytes": _CACHE}
    return settings


def _continuous(config: TrainingConfig, device: str) -> dict[str, Any]:
    blocks = {"num_blocks": 4 * config.sequences, "max_batch_tokens": 8 * _longest(config)}
    return {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": blocks,
    }


def _colocated(config: TrainingConfig, device: str) -> dict[str, Any]:
    return {
        "use_vllm": True,
        "vllm_max_model_length": _longest(config),
        "vllm_gpu_memory_utilization": _MEMORY_SHARE[device],
        "vllm_engine_kwargs": _vllm_arguments(config, device),
    }


def _server(config: TrainingConfig, device: str, **more: Any) -> dict[str, Any]:
    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 240.0, **more}


@dataclass(frozen=True)
class Engine:
    """One way to generate."""

    name: str
    note: str
    settings: Callable[[TrainingConfig, str], dict[str, Any]]  # fields of GRPOConfig
    sent: bool = True  # it has weights of its own, which it is sent
    server: bool = False

    def absent(self) -> str | None:
        """Return why it cannot run here, or None."""
        missing = self.sent and importlib.util.find_spec("vllm") is None
        return "vLLM is not installed here; `make bench-vllm` installs it" if missing else None


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "transformers",
            "`generate` of transformers, with the policy itself",
            lambda config, device: {},
            sent=False,
        ),
        Engine(
            "transformers-continuous",
            "transformers' continuous batching, likewise",
            _continuous,
            sent=False,
        ),
        Engine("vllm-colocate", "vLLM inside the training process", _colocated),
        Engine("vllm-server", "a vLLM server on the same machine", _server, server=True),
        Engine(
            "vllm-server-overlap",
            "the same with overlap_generation: what is left of the wait",
            partial(_server, overlap_generation=True),
            server=True,
        ),
    )
}
_GPU = [replace(SIZES[name], dtype=precision(DEVICE)) for name in ("middle-gpu", "large-gpu")]
CASES = {
    "tiny": [replace(SIZES["tiny"], dtype=precision(DEVICE))],
    "quick": [replace(SIZES["quick"], dtype=precision(DEVICE))],
    "cpu": [SIZES[name] for name in ("quick", "middle", "large")],
    "gpu": _GPU,
    "gpu-full": _GPU,
}


def names(case: TrainingConfig) -> list[str]:
    """Return every engine; at a middle size those that are sent weights, which cost by size."""
    return [name for name, x in ENGINES.items() if x.sent or not case.name.startswith("middle")]


def measure(case: TrainingConfig, names: Sequence[str], session: Session) -> list[Row]:
    """Measure engines, one after another: each fills the machine."""
    environment = dict(_ENVIRONMENT)
    if session.device == "cpu":
        environment["TORCHDYNAMO_DISABLE"] = "1"
    rows = []
    for name in names:
        row = Row(name, ENGINES[name].note)
        row.leave_out("absent", ENGINES[name].absent())
        if row.runs:
            arguments = name, case, session.device, _STEPS
            with attempt(row):
                vars(row).update(ask(_run, *arguments, timeout=_LONGEST, **environment))
        rows.append(row)
    return rows


def about(case: TrainingConfig, device: str) -> str:
    return (
        f"{case.sequences} completions of up to {case.completion_tokens} tokens after "
        f"{case.prompt_tokens}"
    )


def _run(name: str, config: TrainingConfig, device: str, steps: int) -> dict[str, Any]:
    """Return the seconds of ``steps`` steps, and what else the trainer logged of them."""
    engine = ENGINES[name]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(config=config, device=device, steps=_WARM_UP + steps, folder=Path(folder))
        settings = engine.settings(config, device)
        if not engine.server:
            return _train(job, steps, engine, settings)
        with _served(config, device, job.folder) as port:
            return _train(job, steps, engine, settings | {"vllm_server_port": port})


def _train(job: Job, steps: int, engine: Engine, settings: dict[str, Any]) -> dict[str, Any]:
    from grpo_trainer.rollout import policy_weights

    # completions end where they like
    trainer = build("grpo_trainer", job, generation_kwargs=None, write_report=False, **settings)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row][-steps:]
    size = sum(x.numel() * x.element_size() for _, x in policy_weights(trainer.model))
    trainer.rollouts.close()
    seconds = [row["step_time"] for row in rows]
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(_PROFILE))
    phases = {name.removeprefix(_PROFILE): [row.get(name, 0.0) for row in rows] for name in names}
    info = {f"{name}_share": sum(found) / sum(seconds) for name, found in phases.items()}
    if not engine.name.endswith("-overlap"):  # the wait says nothing about how fast it is
        tokens = (job.config.sequences * row["completions/mean_length"] for row in rows)
        info["tokens_per_second"] = median(map(float.__truediv__, tokens, phases["generate"]))
    if engine.sent:
        info["update_seconds"] = median(phases["sync"])
        info["update_gib_per_second"] = size / 2**30 / info["update_seconds"]
    else:
        info.pop("sync_share", None)
    return {"seconds": seconds, "info": info}


@contextmanager
def _served(config: TrainingConfig, device: str, folder: Path) -> Iterator[int]:
    """Yield the port of ``grpo-train serve`` with the model of ``config``."""
    make_model(config).save_pretrained(folder / "model")
    make_tokenizer(config).save_pretrained(folder / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options: dict[str, Any] = {
        "model": folder / "model",
        "port": port,
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "max_model_len": _longest(config),
        "gpu_memory_utilization": _MEMORY_SHARE[device],
        **_vllm_arguments(config, device),
    }
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    log = folder / "server.txt"
    with log.open("wb") as file:
        command = [sys.executable, "-c", _SERVE, "serve", *words]
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        yield port
    except Exception as error:
        error.add_note(f"the server said: {log.read_text()[-3000:]}")
        raise
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it has processes of its own
        process.wait()


def test_rollouts(row: Row) -> None:
    """Time a training step with an engine."""
    assert row.seconds
