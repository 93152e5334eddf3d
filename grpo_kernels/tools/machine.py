"""Facts about this machine and installation, as plain data, and what devices compute."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
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
from grpo_kernels.version import VERSION

EXAMPLE_VOCABULARY = 151936  # of the Qwen models
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
_MARKER = 'extra == "{}"'  # of a requirement of an extra
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# name, pattern of what a driver or a user calls it, TFLOP/s in 16 bits and in fp32: dense GEMMs
# with fp32 sums, by the data sheets. The first pattern that is found decides.
GPUS = (
    ("H100 SXM", r"\bh100\b(?!.*(pcie|nvl))", 989, 67),
    ("H200", r"\bg?h200\b", 989, 67),
    ("B200", r"\bg?b200\b", 2250, 75),
    ("A100", r"\ba100\b", 312, 19.5),
    ("MI300X", r"\bmi300x\b", 1307, 163.4),
)
GPU_NAMES = ", ".join(name for name, *_ in GPUS)
_REACHED = 0.7  # of a data sheet's rate, by large GEMMs: a guess
# TFLOP/s of a thread in 16 bits and in fp32, by the instructions of the native kernels
_MEASURED_THREADS = {"amx": (0.9, 0.2)}  # a Xeon with two threads
_SOME_THREAD = (0.05, 0.05)  # a guess


def facts() -> dict[str, Any]:
    """Return everything that ``grpo-kernels info`` shows."""
    return {
        "versions": versions(),
        "devices": devices(),
        # the instruction sets that the native kernels can use here, the one in use first
        "native_isas": cpu.isas() if cpu.unavailable() is None else [],
        "backends": unavailable_backends(),
        "example_vocabulary": EXAMPLE_VOCABULARY,
        "defaults": [_default(device, dtype) for device in device_types() for dtype in _DTYPES],
        "environment": {name: os.environ.get(name) for name in _VARIABLES},
    }


def versions() -> dict[str, str | None]:
    """Return versions by name; None for a package that is not installed."""
    found = {name: installed_version(name) for name in _PACKAGES}
    own = {"grpo-kernels": VERSION, "python": platform.python_version()}
    return {**own, **found, "cuda": torch.version.cuda, "rocm": torch.version.hip}


def device_types() -> list[str]:
    """Return the types of devices that tensors can be on here."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def devices() -> list[dict[str, Any]]:
    """Return the CPU, then every GPU."""
    found: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "name": cpu_name(),
            "memory_bytes": device_memory("cpu"),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return found


def device_memory(device: str) -> int:
    """Return the total memory, in bytes, of the first device of this type."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.cuda.get_device_properties(0).total_memory


def unavailable_backends() -> dict[str, str | None]:
    """Return the reason why each backend cannot run here; None for those that can."""
    return {name: backend.unavailable() for name, backend in BACKENDS.items()}


def _default(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the choice of ``backend="auto"``, and the rows of its logits tile."""
    where, name, rows = torch.device(device), None, None
    try:
        choice = choose_backend("auto", where, dtype)
    except ValueError as error:  # the environment variable forces one that cannot run
        reasons = [str(error)]
    else:
        name, reasons = choice.name, why_backend(choice, "auto", where, dtype)
        rows = chunk_rows(EXAMPLE_VOCABULARY, dtype, "fp32", where, None)
    return {
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "backend": name,
        "chunk_rows": rows,
        "reasons": reasons,
    }


def gemm_rate(
    device: str, dtype: torch.dtype, gpu: str | None = None, tflops: float | None = None
) -> tuple[float | None, str]:
    """Return the TFLOP/s that GEMMs reach, None if unknown, and where the number comes from.

    Args:
        device: "cuda" or "cpu".
        dtype: of what is multiplied.
        gpu: in place of the present one.
        tflops: known already.

    Raises:
        ValueError: the GPU is not in the table, or is not what is asked for.
    """
    row, column = None, 1 if dtype == torch.float32 else 0
    if gpu is not None:
        if tflops is not None:
            raise ValueError("gpu: not allowed with --tflops")
        row = find_gpu(gpu)
        if row is None or device == "cpu":
            raise ValueError(f"gpu: expected one of {GPU_NAMES}, with --device cuda; got {gpu!r}")
    if tflops is not None:
        return tflops, "--tflops"
    if device == "cpu":
        isa, threads = cpu.isas()[0] if cpu.unavailable() is None else "", torch.get_num_threads()
        rate = _MEASURED_THREADS.get(isa, _SOME_THREAD)[column]
        source = f"measured on another CPU with {isa}" if isa in _MEASURED_THREADS else "a guess"
        return rate * threads, f"{source}, for {threads} threads"
    if row is None and torch.cuda.is_available():
        row = find_gpu(torch.cuda.get_device_name())
    if row is None:
        return None, "not known: --gpu or --tflops says it"
    name, _, *rates = row
    peak = f"{rates[column]:g} TFLOP/s in the data sheet of {name}"
    return rates[column] * _REACHED, f"a guess, {_REACHED:.0%} of the {peak}"


def find_gpu(name: str) -> tuple[str, str, float, float] | None:
    """Return the row of ``GPUS`` for a device's name; None when it is not in the table."""
    plain = re.sub(r"[^a-z0-9]+", " ", name.lower())
    return next((row for row in GPUS if re.search(row[1], plain)), None)


def installed_version(distribution: str) -> str | None:
    """Return a distribution's version; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_command(*extras: str) -> str:
    """Return what installs the packages of our ``extras``: we ourselves may be on no index."""
    try:
        rows = importlib.metadata.requires("grpo-kernels") or []
    except importlib.metadata.PackageNotFoundError:  # runs from the folder of its source
        return f"pip install '.[{','.join(extras)}]'"
    parts = [row.partition(";") for row in rows if not row.startswith("grpo-kernels[")]
    needed = [name for name, _, marker in parts if marker.strip() in map(_MARKER.format, extras)]
    return f"pip install {shlex.join(needed)}"


def cpu_name() -> str:
    """Return the processor's own name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
