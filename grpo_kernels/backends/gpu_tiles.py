"""Tile sizes of the GPU kernels.

They never depend on the number of rows, so a row's bits are the same in every batch. They were
measured on an H200 and are guesses elsewhere; ``make gpu-tune`` measures others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.head import Head

# Rows of a logits tile. By the roofline of an H200, a 16-bit GEMM with about 190 rows needs as long
# as reading its weight; more rows gain nothing. `schedule/loss_plan.py` has the larger tiles.
_TILE_BYTES = 256 << 20
_FEWEST_ROWS, _MOST_ROWS = 256, 16384
# Without fused multiply-add every operation rounds as written: ``z - peak`` is exactly 0 at the
# peak, and a row's bits are the same with and without extra statistics.
NOT_FUSED = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class RowConfig:
    """Tile of a kernel that reads rows of logits."""

    num_warps: int
    depth: int  # 16-byte loads of one thread for one tile
    warp: int = 32  # threads

    @property
    def options(self) -> dict[str, int | bool]:
        """Launch options."""
        return {"num_warps": self.num_warps, **NOT_FUSED}

    def columns(self, dtype: torch.dtype) -> int:
        """Return the number of columns of a tile."""
        return self.num_warps * self.warp * self.depth * (16 // dtype.itemsize)

    def blocks(self, dtype: torch.dtype, aligned: bool) -> dict[str, int]:
        """Return a tile as constants; a thread has adjacent columns if it loads 16 bytes."""
        # columns that are loaded one by one need more registers, so a tile has fewer
        tile = self if aligned else replace(self, depth=max(1, self.depth // 2))
        return {
            "BLOCK_V": tile.columns(dtype),
            "THREADS": self.num_warps * self.warp,
            "VECTOR": 16 // dtype.itemsize if aligned else 1,
        }

    def on(self, device: str) -> RowConfig:
        """Return the same on a class of devices: a warp of AMD's CDNA has 64 threads."""
        return replace(self, warp=64 if device.startswith("gfx9") else 32)


@dataclass(frozen=True)
class LinearConfig:
    """Tile of the GEMM with logits that stay on the chip."""

    block_t: int
    block_v: int
    block_d: int
    num_warps: int
    num_stages: int
    subtiles: int  # 1 or 2 per tile, folded one after the other: fewer live registers
    tiles: int  # per split, the share of the vocabulary that one program folds
    group: int  # row blocks that run side by side
    descriptors: int  # 1: the copy engine (Hopper and later) loads the operands
    flat: int = 0  # 1: loads of the next tile start in the epilogue that stores exponentials

    @property
    def split_columns(self) -> int:
        """Columns of a split."""
        return self.block_v * self.tiles

    @property
    def options(self) -> dict[str, int | bool]:
        """Launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **NOT_FUSED}

    def of_one_subtile(self) -> LinearConfig:
        """Return tiles as wide as a subtile: the same splits and steps, fewer registers."""
        wide = self.block_v // self.subtiles
        tiles = self.tiles * self.subtiles
        return replace(self, block_v=wide, subtiles=1, tiles=tiles)


# measured on an H200: within 2 % of the fastest of 15 in statistics, gradient and both in one read
ROW_CONFIG = RowConfig(num_warps=4, depth=2)
# By prefix of the device class, tiles that fit into registers and shared memory: 144 of 227 KiB on
# H100, B200, B300 and Thor, 64 of 64 KiB on MI300, 48 of 99 KiB or more on other NVIDIA GPUs.
_LINEAR_CONFIGS = {
    ("sm_90", "sm_100", "sm_103", "sm_110"): LinearConfig(
        block_t=128,
        block_v=256,
        block_d=64,
        num_warps=8,
        num_stages=3,
        subtiles=2,
        tiles=8,
        group=16,
        descriptors=1,
    ),
    ("gfx",): LinearConfig(
        block_t=128,
        block_v=128,
        block_d=64,
        num_warps=8,
        num_stages=2,
        subtiles=1,
        tiles=16,
        group=16,
        descriptors=0,
    ),
    ("",): LinearConfig(
        block_t=128,
        block_v=128,
        block_d=32,
        num_warps=8,
        num_stages=3,
        subtiles=2,
        tiles=16,
        group=16,
        descriptors=0,
    ),
}
# for rows that do not start at multiples of 16 bytes: elements are loaded one by one
UNALIGNED_CONFIG = LinearConfig(
    block_t=64,
    block_v=64,
    block_d=32,
    num_warps=8,
    num_stages=1,
    subtiles=1,
    tiles=32,
    group=16,
    descriptors=0,
)


def row_config(device: torch.device) -> RowConfig:
    """Return the tile of a kernel that reads rows of logits."""
    return ROW_CONFIG.on(device_class(device))


def aligned_config(device: str) -> LinearConfig:
    """Return the tile of the fused GEMM on a class of devices, for rows on 16-byte boundaries."""
    return next(tile for names, tile in _LINEAR_CONFIGS.items() if device.startswith(names))


def linear_config(dtype: torch.dtype, head: Head) -> LinearConfig:
    """Return the tile for hidden states of ``dtype`` and ``head``, for any number of rows."""
    weight = head.weight
    # converted or transposed matrices are new copies
    copied = weight.dtype != dtype or weight.stride(1) != 1
    whole = weight.shape[1] * dtype.itemsize % 16 == 0
    on_16_bytes = row_stride(weight) * dtype.itemsize % 16 == 0 and weight.data_ptr() % 16 == 0
    if whole and (copied or on_16_bytes):
        return aligned_config(device_class(weight.device))
    return UNALIGNED_CONFIG


def row_stride(x: Tensor) -> int:
    """Return the row stride in elements; for a single row, its length."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]  # a single row may have any stride


def rows_are_aligned(logits: Tensor) -> bool:
    """Return whether all rows start on 16-byte boundaries, as Triton sees it."""
    return logits.stride(0) % 16 == 0 and logits.data_ptr() % 16 == 0


def gpu_chunk_rows(dtype: torch.dtype, columns: int) -> int:
    """Return the rows of a logits tile of ``dtype`` with ``columns`` columns."""
    rows = _TILE_BYTES // (max(1, columns) * dtype.itemsize)
    return max(_FEWEST_ROWS, min(rows, _MOST_ROWS) // _FEWEST_ROWS * _FEWEST_ROWS)


def device_class(device: torch.device) -> str:
    """Return the class of GPUs that share tiles, such as ``"sm_90"``; otherwise the device type."""
    if device.type != "cuda":
        return device.type
    # a device without an index is the current one, and torch.compile folds the call
    if device.index is None or torch.compiler.is_compiling():
        return _class_of(device)
    return _known_class(device)


def _class_of(device: torch.device) -> str:
    if not torch.cuda.is_available():
        return device.type
    # torch.compile would stop at get_device_capability
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


_known_class = functools.cache(_class_of)
