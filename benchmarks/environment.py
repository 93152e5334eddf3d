"""Machine, versions and commit of a run."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.tools import cpu_name, device_memory, installed_version

ROOT = Path(__file__).parent.parent
_SOURCES = ("grpo_kernels", "grpo_trainer", "csrc", "setup.py", "benchmarks")
_NO_RESULTS = ":(exclude)benchmarks/results"
_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "vllm",
    "trl",
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
    "nvidia-cutlass-dsl",
)


def environment(device: str) -> dict[str, Any]:
    """Return the facts needed to repeat a run on ``device``, "cpu" or "cuda"."""
    gpu = device == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "modified": bool(_git("status", "--porcelain", "--", *_SOURCES, _NO_RESULTS)),
        "device": torch.cuda.get_device_name() if gpu else cpu_name(),
        "kind": device,
        "isa": None if gpu else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(device_memory(device) / 2**30, 1),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in _PACKAGES},
    }


def commit() -> str:
    """Return the commit, from the variable COMMIT or git; else a digest of the sources."""
    return os.environ.get("COMMIT") or _git("rev-parse", "HEAD") or f"src-{_digest()}"


def slug(name: str) -> str:
    """Return a device's name in a form that a folder can have."""
    plain = re.sub(r"\((R|TM)\)", "", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")


def _digest() -> str:
    digest = hashlib.sha256()
    for source in _SOURCES:
        path = ROOT / source
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return None
    return run.stdout.strip()
