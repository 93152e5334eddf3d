"""Decides which backend runs, and says why. Nothing else decides it."""

from __future__ import annotations

import functools
import itertools
import os
import warnings

import torch

from grpo_kernels.backends.cpu import Native
from grpo_kernels.backends.gpu_tiles import device_class, gpu_chunk_rows
from grpo_kernels.backends.torch_backend import Backend
from grpo_kernels.backends.triton_backend import Triton
from grpo_kernels.head import logits_dtype

BACKEND_VARIABLE = "GRPO_KERNELS_BACKEND"

# Default size of the logits tile on a CPU (on a GPU it is a number of rows). GEMMs with 250 rows
# are as fast as with more, which only cost memory; with 200 rows they are measurably slower.
_CPU_WORKSPACE_BYTES = 160 << 20


class _Reference(Backend):
    """The eager reference, which has no tile: it consists of ``reference_logprobs``."""

    name, has_tiles = "reference", False


# in order of preference
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Triton(), Native(), Backend(), _Reference())
}


def available_backends() -> tuple[str, ...]:
    """Return the names of the backends that this machine can run, in order of preference."""
    return tuple(name for name, backend in BACKENDS.items() if backend.unavailable() is None)


def requested_backend(backend: str) -> str:
    """Return the argument, or for ``"auto"`` the environment variable if it is set."""
    return (os.environ.get(BACKEND_VARIABLE) or backend) if backend == "auto" else backend


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """Choose the backend for such tensors.

    An argument other than ``"auto"`` decides, then the environment variable
    ``GRPO_KERNELS_BACKEND``, then the first backend that can run.

    Raises:
        ValueError: the name is unknown, or the backend cannot run here or on these tensors.
    """
    name = requested_backend(requested)
    if name == "auto":
        return next(b for b in BACKENDS.values() if passed_over(b, device, dtype) is None)
    if not isinstance(name, str) or name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ValueError(f"{_source(requested)}: expected one of {known}; got {name!r}")
    why_not = BACKENDS[name].unavailable() or BACKENDS[name].unsuited(device, dtype)
    if why_not is not None:
        raise ValueError(f"{_source(requested)}: {name!r} cannot run: {why_not}")
    return BACKENDS[name]


def _source(requested: str) -> str:
    return "backend" if requested != "auto" else BACKEND_VARIABLE


def passed_over(backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why ``"auto"`` does not choose a backend for such tensors; None if it could.

    Warn once per process about a backend that only needs to be installed.
    """
    unsuited = backend.unsuited(device, dtype)
    if backend.for_gpus and device.type == "cpu":
        unsuited = "the tensors are on the CPU"
    why = unsuited or backend.unavailable()
    if why and not unsuited and (device.type == "cpu" or torch.cuda.is_available()):
        warn_once(backend.absence.format(why))
    return why


@functools.cache
def warn_once(message: str) -> None:
    """Warn that a slower path is used."""
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def why_backend(
    chosen: Backend, requested: str, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Say, for ``explain``, why :func:`choose_backend` chose this backend."""
    if requested_backend(requested) != "auto":
        return [f"{chosen.name}: forced by {_source(requested)}"]
    passed = itertools.takewhile(lambda backend: backend is not chosen, BACKENDS.values())
    reasons = [f"not {each.name}: {passed_over(each, device, dtype)}" for each in passed]
    return [*reasons, f"{chosen.name}: the first in the order of preference that can run"]


def chunk_rows(
    columns: int,
    dtype: torch.dtype,
    precision: str,
    device: torch.device,
    max_workspace_bytes: int | None,
) -> int:
    """Return how many rows of logits fit into the workspace, ignoring gaps between rows.

    Raises:
        ValueError: the workspace does not hold one row.
    """
    tile_dtype = logits_dtype(dtype, precision)
    row_bytes = max(1, columns) * tile_dtype.itemsize
    if max_workspace_bytes is None:
        if device.type != "cpu":
            return gpu_chunk_rows(tile_dtype, columns)
        max_workspace_bytes = max(_CPU_WORKSPACE_BYTES, row_bytes)
    rows = max_workspace_bytes // row_bytes
    if rows < 1:
        raise ValueError(
            f"max_workspace_bytes: expected at least {row_bytes} (one row of {columns} logits), "
            f"got {max_workspace_bytes}"
        )
    # full blocks of a GEMM; for a small tile, blocks of its innermost loop
    block = 1 if rows < 64 else 16 if rows < 256 else 64
    return rows // block * block


def device_numerics(device: torch.device) -> str:
    """Name a device, as precisely as bits depend on it."""
    return torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device_class(device)
