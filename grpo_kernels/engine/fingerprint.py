"""A short line that names all that a head's numerics depend on besides its inputs.

Two runs whose lines are equal form their statistics by the same kernels with the same tiles, in the
same precision, from the same libraries. The line says nothing of the number of rows: with
``batch_invariant`` it has no influence, without it some by fp32 rounding.
"""

from __future__ import annotations

import hashlib

import torch

from grpo_kernels.backends import device_numerics
from grpo_kernels.engine.route import Route
from grpo_kernels.head import Head
from grpo_kernels.version import VERSION


def fingerprint(route: Route, head: Head, schedule: str | None = None) -> str:
    """Return the line for the route of a head; it ends in a hash of the rest."""
    backend, dtype, device = route.backend, route.dtype, head.weight.device
    tiled = route.has_tile
    parts = [
        f"grpo-kernels {VERSION}",
        " ".join([backend.name, *backend.numerics(dtype, head, route.precision, tiled)]),
        route.forward,
        *([f"LoRA of rank {head.lora.rank}"] if head.lora is not None else []),
        f"{str(dtype).removeprefix('torch.')} precision={route.precision}",
        *([schedule] if schedule is not None else []),
        *([f"vocabulary over {head.shard.size} ranks"] if head.shard is not None else []),
        *(["batch_invariant"] if route.options.batch_invariant else []),
        *([str(route.options.bounded)] if route.options.bounded is not None else []),
        " ".join([*_device(device, route, head), *_libraries(device)]),
    ]
    line = " | ".join(parts)
    return f"{line} | {hashlib.sha256(line.encode()).hexdigest()[:8]}"


def _device(device: torch.device, route: Route, head: Head) -> list[str]:
    """Describe the device; on a CPU a library's GEMM depends on the number of threads, too."""
    by_library = device.type == "cpu" and (route.has_tile or head.lora is not None)
    threads = [f"threads={torch.get_num_threads()}"] if by_library else []
    return [device_numerics(device), *threads]


def _libraries(device: torch.device) -> list[str]:
    """Return the versions of the libraries that multiply."""
    found = [f"torch={torch.__version__}"]
    if device.type == "cuda":
        library = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[-1]
        found.append(f"blas={library} {torch.version.cuda or torch.version.hip}")
    return found
