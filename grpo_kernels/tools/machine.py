"""Facts about this machine and installation, as plain data."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.backends import (
    BACKEND_VARIABLE,
    BACKENDS,
    choose_backend,
    chunk_rows,
    cpu,
    why_backend,
)
from grpo_kernels.common import VERSION

_EXAMPLE_VOCABULARY = 151936  # of the Qwen models
_PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "vllm")
_VARIABLES = (
    BACKEND_VARIABLE,
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def facts() -> dict[str, Any]:
    """Return everything that ``grpo-kernels info`` prints."""
    return {
        "versions": versions(),
        "devices": list(_devices()),
        "native_isas": native_isas(),
        "backends": unavailable_backends(),
        "example_vocabulary": _EXAMPLE_VOCABULARY,
        "defaults": [_default(device, dtype) for device in device_types() for dtype in _DTYPES],
        "environment": {name: os.environ.get(name) for name in _VARIABLES},
    }


def versions() -> dict[str, str | None]:
    """Return versions by name; None for a package that is not installed."""
    return {
        "grpo-kernels": VERSION,
        "python": platform.python_version(),
        **{name: installed_version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
    }


def native_isas() -> list[str]:
    """Return the instruction sets of the native kernels on this CPU, the one in use first."""
    return cpu.isas() if BACKENDS["cpu"].unavailable() is None else []


def unavailable_backends() -> dict[str, str | None]:
    """Return why each backend cannot run here; None if it can."""
    return {name: backend.unavailable() for name, backend in BACKENDS.items()}


def device_types() -> list[str]:
    """Return the device types of this machine."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def device_memory(device: str) -> int:
    """Return the total memory of the first device of this type, in bytes."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.cuda.get_device_properties(0).total_memory


def _devices() -> Iterator[dict[str, Any]]:
    """Yield the CPU, then every GPU."""
    yield {
        "device": "cpu",
        "name": cpu_name(),
        "memory_bytes": device_memory("cpu"),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield {
            "device": f"cuda:{index}",
            "name": gpu.name,
            "memory_bytes": gpu.total_memory,
            "capability": f"{gpu.major}.{gpu.minor}",
        }


def _default(type_: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the choice of ``backend="auto"``, and the rows of its logits tile."""
    device = torch.device(type_)
    question = {"device": type_, "dtype": str(dtype).removeprefix("torch.")}
    try:
        choice = choose_backend("auto", device, dtype)
    except ValueError as error:  # the environment variable forces a backend that cannot run
        return {**question, "backend": None, "chunk_rows": None, "reasons": [str(error)]}
    return {
        **question,
        "backend": choice.name,
        "chunk_rows": chunk_rows(
            columns=_EXAMPLE_VOCABULARY,
            dtype=dtype,
            precision="fp32",
            device=device,
            max_workspace_bytes=None,
        ),
        "reasons": why_backend(choice, "auto", device, dtype),
    }


def installed_version(distribution: str) -> str | None:
    """Return a distribution's version; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_command(*extras: str) -> str:
    """Return the command that installs these ``extras``; the last one contains the others.

    Outside a clone the command names their packages, since grpo-kernels may not be on an index.
    """
    from_clone = f"pip install '.[{extras[-1]}]'"
    try:
        rows = importlib.metadata.requires("grpo-kernels") or []
    except importlib.metadata.PackageNotFoundError:  # not installed: run from the source folder
        return from_clone
    markers = [f'extra == "{extra}"' for extra in extras]
    parts = [row.partition(";") for row in rows if not row.startswith("grpo-kernels[")]
    needed = [name for name, _, marker in parts if marker.strip() in markers]
    return f"{from_clone} in a clone, or pip install {shlex.join(needed)}"


def cpu_name() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    line = re.search(r"^model name\s*: (.*)", text, re.M)
    return line[1].strip() if line else platform.processor() or platform.machine()
