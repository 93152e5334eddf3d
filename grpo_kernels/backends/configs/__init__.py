"""Tile sizes of the GPU kernels: the tuned ones where there are some, else the defaults."""

from grpo_kernels.backends.configs.linear import (
    LinearCase,
    LinearConfig,
    linear_config,
    row_stride,
)
from grpo_kernels.backends.configs.rows import (
    RowConfig,
    device_class,
    gpu_chunk_rows,
    row_config,
)

__all__ = [
    "LinearCase",
    "LinearConfig",
    "RowConfig",
    "device_class",
    "gpu_chunk_rows",
    "linear_config",
    "row_config",
    "row_stride",
]
