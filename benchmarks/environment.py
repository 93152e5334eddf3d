"""Machine, versions and commit of a run."""

from __future__ import annotations

import datetime
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
    *("torch", "triton", "transformers", "vllm", "trl", "liger-kernel", "cut-cross-entropy"),
    *("quack-kernels", "nvidia-cutlass-dsl"),
)


def environment(device: str) -> dict[str, Any]:
    """Return the facts needed to repeat a run on ``device``, "cpu" or "cuda"."""
    gpu = device == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # where there is no checkout, who carried the sources says of which commit they are
        "commit": os.environ.get("COMMIT") or _git("rev-parse", "HEAD") or "unknown",
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


def slug(name: str) -> str:
    """Return a device's name in a form that a folder can have."""
    plain = re.sub(r"\((R|TM)\)", "", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")


def _git(*arguments: str) -> str:
    try:
        return subprocess.check_output(["git", *arguments], cwd=ROOT, stderr=-3, text=True).strip()
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return ""
