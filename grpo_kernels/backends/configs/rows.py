"""Tile sizes on a GPU: the tuned ones where there are some, else the defaults.

They depend on the device, the kernel, the dtype and the vocabulary, never on the row count: a row's
bits are the same in every batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.backends.configs.tuned import CHUNK_ROWS, ROW_CONFIGS

ROW_KERNELS = ("stats", "dlogits", "loss")
# Of a logits tile. By the roofline of an H200 a 16-bit GEMM of some 190 rows takes as long as
# reading the weight for it; more rows gain nothing. `schedule/plan.py` has the larger tiles.
_TILE_BYTES = 256 << 20
_FEWEST_ROWS, _MOST_ROWS = 256, 16384
_UP_TO = {"small": 65_536, "medium": 196_608}  # columns; beyond: "large"


@dataclass(frozen=True)
class RowConfig:
    """Tile of one row kernel."""

    num_warps: int
    depth: int  # 16-byte loads of one thread for one tile
    warp: int = 32  # threads

    @property
    def options(self) -> dict[str, int | bool]:
        """Launch options. Without fusion of ``a * b + c`` every operation rounds as it is written:
        ``z - peak`` is exactly 0 at the peak, and the interpreter's numbers are the GPU's."""
        return {"num_warps": self.num_warps, "enable_fp_fusion": False}

    def columns(self, dtype: torch.dtype) -> int:
        """Return the number of columns of a tile."""
        return self.num_warps * self.warp * self.depth * (16 // dtype.itemsize)

    def blocks(self, dtype: torch.dtype, aligned: bool) -> dict[str, int]:
        """Return a tile as constants; a thread has neighbouring columns where it loads 16 bytes.

        Columns that are loaded one by one take more registers: a tile has fewer.
        """
        tile = self if aligned else replace(self, depth=max(1, self.depth // 2))
        return {
            "BLOCK_V": tile.columns(dtype),
            "THREADS": self.num_warps * self.warp,
            "VECTOR": 16 // dtype.itemsize if aligned else 1,
        }

    def on(self, device: str) -> RowConfig:
        """Return the same on a class of devices: a warp of AMD's CDNA has 64 threads."""
        return replace(self, warp=64 if device.startswith("gfx9") else 32)


DEFAULT_ROW_CONFIG = RowConfig(num_warps=4, depth=4)


@functools.cache
def row_config(kernel: str, dtype: torch.dtype, columns: int, device: torch.device) -> RowConfig:
    """Return the tile of one of ``ROW_KERNELS`` on (C, ``columns``) logits of ``dtype``."""
    assert kernel in ROW_KERNELS
    key = (device_class(device), kernel, bits(dtype), vocabulary_class(columns))
    tuned = ROW_CONFIGS.get(key)
    return (DEFAULT_ROW_CONFIG if tuned is None else RowConfig(*tuned)).on(key[0])


def rows_are_aligned(logits: Tensor) -> bool:
    """Return whether all rows begin where 16 bytes can be loaded at once, as Triton sees it."""
    return logits.stride(0) % 16 == 0 and logits.data_ptr() % 16 == 0


def gpu_chunk_rows(dtype: torch.dtype, columns: int, device: torch.device) -> int:
    """Return the rows of a logits tile of ``dtype`` with ``columns`` columns."""
    key = (device_class(device), bits(dtype), vocabulary_class(columns))
    tuned = CHUNK_ROWS.get(key)
    return default_chunk_rows(dtype, columns) if tuned is None else tuned


def default_chunk_rows(dtype: torch.dtype, columns: int) -> int:
    """Return the same where nothing was tuned."""
    rows = _TILE_BYTES // (max(1, columns) * dtype.itemsize)
    return max(_FEWEST_ROWS, min(rows, _MOST_ROWS) // _FEWEST_ROWS * _FEWEST_ROWS)


def device_class(device: torch.device) -> str:
    """Return the class of GPUs that share a tuning, ``"sm_90"`` or ``"gfx942"``; else the type."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    # torch.compile folds this call; it would stop at get_device_capability
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def has_bf16(device: torch.device) -> bool:
    """Return whether the matrix units of a device take bf16; elsewhere it is emulated, slowly."""
    name = device_class(device)
    return not name.startswith("sm_") or int(name.removeprefix("sm_")) >= 80


def bits(dtype: torch.dtype) -> int:
    """Return the bits of a logit; both 16-bit dtypes share their entries."""
    return dtype.itemsize * 8


def vocabulary_class(columns: int) -> str:
    """Return the class of a vocabulary, ``"small"``, ``"medium"`` or ``"large"``."""
    return next((name for name, most in _UP_TO.items() if columns <= most), "large")
