"""Which backend runs, and why: the only place where that is decided."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.backends.base import LinearStats, RowKernels
from grpo_kernels.backends.triton.configs import gpu_chunk_rows
from grpo_kernels.backends.triton.linear_configs import LinearCase
from grpo_kernels.head.head import Head, logits_dtype

BACKEND_VARIABLE = "GRPO_KERNELS_BACKEND"
REFERENCE = "reference"

# Default size of the logits tile. On a CPU it bounds memory: down to 200 rows the products are as
# fast, but 16-bit inputs gain from a single chunk, whose weight gradient needs no fp32 accumulator
# (V * D * 4 bytes). On a GPU it is rows.
_CPU_WORKSPACE_BYTES = 128 << 20
_CPU_WORKSPACE_BYTES_16BIT = 320 << 20


@dataclass(frozen=True)
class Backend:
    """A way to run the passes over a logits tile."""

    name: str
    kernels: Callable[[], RowKernels] | None  # None: the eager reference, which has no tiles
    unavailable: Callable[[], str | None]  # why this machine cannot run it
    unsuited: Callable[[torch.device, torch.dtype], str | None]  # why these tensors cannot use it
    # (hidden states, head, precision) -> the forward without logits in memory, where there is one
    linear_stats: Callable[[Tensor, Head, str], LinearStats | None] = lambda *_: None


def _module(name: str):
    return importlib.import_module(f"grpo_kernels.backends.{name}")


def _cpu_unsuited(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"the tensors are on {device.type}"
    return "the native kernels have no fp64" if dtype == torch.float64 else None


def _triton_unsuited(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are on the CPU"
    return "the Triton kernels have no fp64" if dtype == torch.float64 else None


# in order of preference
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            "triton",
            lambda: _module("triton.rows").TRITON_ROWS,
            lambda: _triton_unavailable(),
            _triton_unsuited,
            lambda hidden, head, precision: _triton_linear_stats(hidden, head, precision),
        ),
        Backend(
            "cpu",
            lambda: _module("cpu.linear").NATIVE_HEAD_ROWS,
            lambda: _module("cpu.rows").unavailable(),
            _cpu_unsuited,
            lambda *_: _module("cpu.linear").NATIVE_LINEAR,
        ),
        Backend(
            "chunked",
            lambda: _module("chunked").TORCH_ROWS,
            lambda: None,
            lambda device, dtype: None,
        ),
        Backend(REFERENCE, None, lambda: None, lambda device, dtype: None),
    )
}


def _triton_linear_stats(hidden: Tensor, head: Head, precision: str) -> LinearStats | None:
    if head.lora is not None:  # its update is added to a tile
        return None
    if not LinearCase.of(hidden, head, precision).pays:
        return None
    return _module("triton.linear_launch").linear_stats


def _triton_unavailable() -> str | None:
    try:
        return _module("triton.rows").unavailable()
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return "triton is not installed"


@dataclass(frozen=True)
class Choice:
    """A chosen backend with the reasons for it."""

    backend: Backend
    reasons: tuple[str, ...]

    def kernels(self) -> RowKernels:
        assert self.backend.kernels is not None
        return self.backend.kernels()

    def linear_stats(self, hidden: Tensor, head: Head, precision: str) -> LinearStats | None:
        """The forward without logits in memory; None where it does not exist for these."""
        return self.backend.linear_stats(hidden, head, precision)


def available_backends() -> tuple[str, ...]:
    """Names of the backends that this machine can run, the preferred first."""
    return tuple(name for name, backend in BACKENDS.items() if backend.unavailable() is None)


def requested_backend(backend: str) -> str:
    """The argument, or what the environment says in place of ``"auto"``."""
    return (os.environ.get(BACKEND_VARIABLE) or backend) if backend == "auto" else backend


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """The backend for these tensors.

    An argument other than ``"auto"`` decides; then the environment variable
    ``GRPO_KERNELS_BACKEND``; then the first that can run.

    Raises:
        ValueError: the name is unknown, or that backend cannot run here or on these tensors.
    """
    source = "backend" if requested != "auto" else BACKEND_VARIABLE
    requested = requested_backend(requested)
    if requested != "auto":
        return _forced(requested, source, device, dtype)
    reasons = []
    for backend in BACKENDS.values():
        # the interpreter runs kernels one program at a time: only on request
        interpreted = backend.name == "triton" and device.type == "cpu"
        why_not = (
            "the tensors are on the CPU"
            if interpreted
            else backend.unsuited(device, dtype) or backend.unavailable()
        )
        if why_not is None:
            reasons.append(f"{backend.name}: the first of the preferred order that can run")
            return Choice(backend, tuple(reasons))
        reasons.append(f"not {backend.name}: {why_not}")
        if backend.name == "cpu" and device.type == "cpu" and dtype != torch.float64:
            _module("cpu.rows").announce_absence()
    raise AssertionError("the chunked backend runs everywhere")


def _forced(requested: str, source: str, device: torch.device, dtype: torch.dtype) -> Choice:
    if requested not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ValueError(f"{source}: expected one of {known}; got {requested!r}")
    backend = BACKENDS[requested]
    why_not = backend.unavailable() or backend.unsuited(device, dtype)
    if why_not is not None:
        raise ValueError(f"{source}: {requested!r} cannot run: {why_not}")
    return Choice(backend, (f"{requested}: forced by {source}",))


def chunk_rows(
    columns: int,
    dtype: torch.dtype,
    precision: str,
    device: torch.device,
    max_workspace_bytes: int | None,
) -> int:
    """Rows of the logits tile that fit into the workspace.

    Raises:
        ValueError: the workspace does not hold one row.
    """
    tile_dtype = logits_dtype(dtype, precision)
    row_bytes = max(1, columns) * tile_dtype.itemsize
    if max_workspace_bytes is None:
        if device.type != "cpu":
            return gpu_chunk_rows(tile_dtype, columns, device)
        wide = dtype.itemsize > 2
        default = _CPU_WORKSPACE_BYTES if wide else _CPU_WORKSPACE_BYTES_16BIT
        max_workspace_bytes = max(default, row_bytes)
    rows = max_workspace_bytes // row_bytes
    if rows < 1:
        raise ValueError(
            f"max_workspace_bytes: expected at least {row_bytes} (one row of {columns} logits), "
            f"got {max_workspace_bytes}"
        )
    return _rounded(rows)


def _rounded(rows: int) -> int:
    """To full blocks of a product; of a small tile only to those of its innermost loop."""
    block = 1 if rows < 64 else 16 if rows < 256 else 64
    return rows // block * block
