"""Triton kernels and what launches them. Importing this room imports Triton."""

from grpo_kernels.backends.triton.entries import TRITON_ENTRIES
from grpo_kernels.backends.triton.linear_launch import linear_stats
from grpo_kernels.backends.triton.row_loss import MAX_VALUES, RowFunction, row_loss_
from grpo_kernels.backends.triton.rows import TRITON_ROWS
from grpo_kernels.backends.triton.scale import scaled_
from grpo_kernels.backends.triton.segment_sum import segment_sum

__all__ = [
    "MAX_VALUES",
    "TRITON_ENTRIES",
    "TRITON_ROWS",
    "RowFunction",
    "linear_stats",
    "row_loss_",
    "scaled_",
    "segment_sum",
]
