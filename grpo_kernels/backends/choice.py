"""Which backend runs, and why: the only place where that is decided."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import cpu, triton_install
from grpo_kernels.backends.base import (
    Backend,
    Entries,
    RowStats,
    StatsGrad,
    Tile,
    TileGradient,
)
from grpo_kernels.backends.gpu_tiles import (
    device_class,
    gpu_chunk_rows,
    has_bf16,
    linear_config,
    row_config,
)
from grpo_kernels.backends.torch_backend import Chunked
from grpo_kernels.head import Head, logits_dtype

BACKEND_VARIABLE = "GRPO_KERNELS_BACKEND"

# Default size of the logits tile on a CPU; on a GPU it is rows. GEMMs of 250 rows are as fast as
# those of more, which only cost memory; with 200 they are measurably slower.
_CPU_WORKSPACE_BYTES = 160 << 20


class _Reference(Backend):
    """The eager reference, which has no tile: ``reference_logprobs`` is all of it."""

    name, has_tiles = "reference", False


class _Triton(Backend):
    """Its kernels are imported on first use: they import Triton."""

    name, generates, compiles = "triton", True, True

    def unavailable(self) -> str | None:
        return triton_install.unavailable()

    def unsuited(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "the tensors are on the CPU"
        if dtype == torch.float64:
            return "the Triton kernels have no fp64"
        if dtype == torch.bfloat16 and not has_bf16(device):
            return (
                f"bf16 takes a device of compute capability 8.0, and this is {device_class(device)}"
            )
        if device.type != "cpu":
            triton_install.announce_absence()  # once, where it would have served
        return None

    def only_by_name(self, device: torch.device) -> str | None:
        # the interpreter runs kernels one program at a time
        return "the tensors are on the CPU" if device.type == "cpu" else None

    def numerics(self, dtype: torch.dtype, head: Head, precision: str, tiled: bool) -> list[str]:
        import triton  # by its module: the distribution has other names on other platforms

        version = f"triton={triton.__version__}"
        tile = row_config(head.weight.device) if tiled else linear_config(dtype, head)
        return [version, str(tile)]

    @property
    def _kernels(self) -> Any:
        from grpo_kernels.backends import triton

        return triton

    def stats(self, tile: Tile, extras: bool) -> RowStats:
        return self._kernels.row_stats(tile, extras)

    def dlogits_(
        self,
        tile: Tile,
        stats: RowStats,
        outer: StatsGrad,
        out_dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        return self._kernels.dlogits_(tile, stats, outer, out_dtype, out)

    def gives_logp_gradient(self, out_dtype: torch.dtype) -> bool:
        return out_dtype == torch.bfloat16  # fp16 has not the range

    def logp_gradient_(self, tile: Tile) -> tuple[RowStats, TileGradient]:
        return self._kernels.logp_gradient_(tile)

    def weighted_gradient(self, gradient: TileGradient, dlogp: Tensor) -> TileGradient:
        return self._kernels.weighted_gradient(gradient, dlogp)

    def has_linear_stats(self, dtype: torch.dtype, head: Head, precision: str) -> bool:
        # the library is faster for fp32 inputs, and an adapter's update is added to a tile
        return head.lora is None and dtype.itemsize == 2

    def linear_stats(
        self, hidden: Tensor, head: Head, target: Tensor, precision: str, extras: bool
    ) -> RowStats:
        return self._kernels.linear_stats(hidden, head, target, precision, extras)

    def extract_entries(
        self, tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int
    ) -> Entries:
        return self._kernels.extract_entries(tile, stats, keys, allowed, slots)

    def entries_matmul(self, entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor) -> None:
        self._kernels.entries_matmul(entries, factor, matrix, out)

    def entries_transposed_matmul(
        self, entries: Entries, factor: Tensor, rows: Tensor, out: Tensor, add: bool
    ) -> None:
        self._kernels.entries_transposed_matmul(entries, factor, rows, out, add)


# in order of preference
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (_Triton(), cpu.Native(), Chunked(), _Reference())
}


def available_backends() -> tuple[str, ...]:
    """Name the backends that this machine can run, the preferred first."""
    return tuple(name for name, backend in BACKENDS.items() if backend.unavailable() is None)


def requested_backend(backend: str) -> str:
    """Return the argument, or what the environment says in place of ``"auto"``."""
    return (os.environ.get(BACKEND_VARIABLE) or backend) if backend == "auto" else backend


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """Choose the backend for such tensors.

    An argument other than ``"auto"`` decides; then the environment variable
    ``GRPO_KERNELS_BACKEND``; then the first that can run.

    Raises:
        ValueError: the name is unknown, or that backend cannot run here or on these tensors.
    """
    name = requested_backend(requested)
    if name == "auto":
        return next(b for b in BACKENDS.values() if passed_over(b, device, dtype) is None)
    source = "backend" if requested != "auto" else BACKEND_VARIABLE
    if not isinstance(name, str) or name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ValueError(f"{source}: expected one of {known}; got {name!r}")
    why_not = BACKENDS[name].unavailable() or BACKENDS[name].unsuited(device, dtype)
    if why_not is not None:
        raise ValueError(f"{source}: {name!r} cannot run: {why_not}")
    return BACKENDS[name]


def passed_over(backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why ``"auto"`` does not take a backend for such tensors; None if it could."""
    return backend.only_by_name(device) or backend.unsuited(device, dtype) or backend.unavailable()


def why_backend(
    chosen: Backend, requested: str, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Say, for ``explain``, why :func:`choose_backend` took this one."""
    if requested_backend(requested) != "auto":
        source = "backend" if requested != "auto" else BACKEND_VARIABLE
        return [f"{chosen.name}: forced by {source}"]
    reasons = []
    for backend in BACKENDS.values():
        if backend is chosen:
            break
        reasons.append(f"not {backend.name}: {passed_over(backend, device, dtype)}")
    return [*reasons, f"{chosen.name}: the first of the preferred order that can run"]


def chunk_rows(
    columns: int,
    dtype: torch.dtype,
    precision: str,
    device: torch.device,
    max_workspace_bytes: int | None,
) -> int:
    """Return how many rows of logits fit into the workspace, gaps between them (of less than 128
    bytes) not counted.

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
    return _rounded(rows)


def _rounded(rows: int) -> int:
    """Round rows up to full blocks of a GEMM; a small tile only to those of its innermost loop."""
    block = 1 if rows < 64 else 16 if rows < 256 else 64
    return rows // block * block


def device_numerics(device: torch.device) -> str:
    """Name a device as far as bits depend on it."""
    return torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device_class(device)
