"""An entry of the result file for one engine on one model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rollouts.engines import Engine
from benchmarks.rollouts.sizes import sizes

ROOT = Path(__file__).parent.parent.parent
_LONGEST = 600.0  # seconds of an engine that starts and trains a few steps
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine share the cores
}


def measure_rollouts(engine: Engine, size: str, device: str, steps: int) -> dict[str, Any]:
    """An entry of the result file's ``rollouts`` list, as plain data.

    Args:
        engine: generates.
        size: of the model.
        device: ``cpu`` or ``cuda``.
        steps: that are measured.
    """
    config = sizes(device)[size]
    entry = {
        "engine": engine.name,
        "note": engine.note,
        "sent": engine.sent,
        "model": str(config),
        "dtype": "fp32" if device == "cpu" else "bf16",
        "sequences": config.sequences,
        "prompt_tokens": config.prompt_tokens,
        "completion_tokens": config.completion_tokens,
        "failure": None,
    }
    return entry | _ask([engine.name, size, device, str(steps)], device)


def _ask(words: list[str], device: str) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": path}
    if device == "cpu":
        environment["TORCHDYNAMO_DISABLE"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.rollouts.run", *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said, complained = process.communicate(timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        return {"failure": f"did not finish in {_LONGEST:.0f} s"}
    finally:
        _end(process)
    if process.returncode != 0:
        print(complained[-5000:], file=sys.stderr)
        last = [line for line in complained.splitlines() if line.strip()][-1:]
        return {"failure": (last or [f"exit code {process.returncode}"])[0][:200]}
    return json.loads(said.splitlines()[-1])


def _end(process: subprocess.Popen[str]) -> None:
    """With the server that it may have started."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
