"""Tile sizes of the GPU kernels: the tuned ones where there are some, else the defaults."""

from grpo_kernels.backends.configs.linear import (
    LinearCase,
    LinearConfig,
    linear_config,
    origin,
    row_stride,
)
from grpo_kernels.backends.configs.rows import (
    RowConfig,
    device_class,
    gpu_chunk_rows,
    has_bf16,
    row_config,
    rows_are_aligned,
)
