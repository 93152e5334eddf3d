"""A short line that names all that a head's numerics depend on besides its inputs.

Two runs whose lines are equal form their statistics by the same kernels with the same tiles, in the
same precision, from the same libraries. The line says nothing of the number of rows: with
``batch_invariant`` it has no influence, without it some by fp32 rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_kernels.backends.triton.configs import device_class, row_config
from grpo_kernels.engine.route import Path
from grpo_kernels.head.head import Head, logits_dtype
from grpo_kernels.version import VERSION


def fingerprint(path: Path, hidden: Tensor, head: Head, schedule: str | None = None) -> str:
    """The line for ``hidden`` (T, D) before ``head``; its last part is a hash of the others."""
    name = path.choice.backend.name
    configured = _CONFIGS.get(name, lambda *_: [])(path, hidden, head)
    parts = [
        f"grpo-kernels {VERSION}",
        " ".join([name, *configured]),
        forward_name(path),
        *([f"LoRA of rank {head.lora.rank}"] if head.lora is not None else []),
        f"{str(hidden.dtype).removeprefix('torch.')} precision={path.precision}",
        *([schedule] if schedule is not None else []),
        *(["batch_invariant"] if path.batch_invariant else []),
        " ".join([*_device(hidden.device, path, head), *_libraries(name, hidden.device)]),
    ]
    line = " | ".join(parts)
    return f"{line} | {hashlib.sha256(line.encode()).hexdigest()[:8]}"


def forward_name(path: Path) -> str:
    """How statistics are formed."""
    if path.choice.backend.kernels is None:
        return "full logits"
    if path.linear_stats is not None:
        return "linear_stats"
    return f"logits tile of {path.tile_rows} rows" + (", filled up" if path.fixed_rows else "")


def _triton(path: Path, hidden: Tensor, head: Head) -> list[str]:
    dtype = logits_dtype(hidden.dtype, path.precision)
    if path.linear_stats is None:
        return [str(row_config("stats", dtype, head.weight.shape[0], hidden.device))]
    from grpo_kernels.backends.triton.linear_launch import config_of

    return [str(config_of(hidden, head, path.precision))]


def _cpu(path: Path, hidden: Tensor, head: Head) -> list[str]:
    from grpo_kernels.backends.cpu.rows import isa

    return [isa()]


# backend -> what its kernels are configured by
_CONFIGS: dict[str, Callable[[Path, Tensor, Head], list[str]]] = {"triton": _triton, "cpu": _cpu}


def _device(device: torch.device, path: Path, head: Head) -> list[str]:
    """The device; on a CPU a library's product depends on the number of threads, too."""
    if device.type != "cpu":
        return [device_class(device)]
    capability = torch.backends.cpu.get_cpu_capability()
    by_library = path.linear_stats is None or head.lora is not None
    return [capability, *([f"threads={torch.get_num_threads()}"] if by_library else [])]


def _libraries(backend: str, device: torch.device) -> list[str]:
    """Versions of what multiplies and of what compiles the kernels."""
    found = [f"torch={torch.__version__}"]
    if device.type == "cuda":
        library = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[-1]
        found.append(f"blas={library} {torch.version.cuda or torch.version.hip}")
    if backend == "triton":
        import triton  # whose distribution has other names on other platforms

        found.append(f"triton={triton.__version__}")
    return found
