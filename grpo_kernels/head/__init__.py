"""What makes logits: the head, its checks, and GEMMs that accumulate in fp32. Knows no loss."""

from grpo_kernels.head import mkl
from grpo_kernels.head.checks import (
    autocast_dtype,
    check_device,
    check_floating,
    check_mask_range,
    check_plain,
    check_row_temperature,
    check_target_range,
    checked_head,
    first_derivative_only,
    head_of,
    no_second_derivative,
    row_temperature,
)
from grpo_kernels.head.head import (
    PRECISIONS,
    Head,
    HeadLoRA,
    Transform,
    logits_dtype,
    stats_dtype,
)
from grpo_kernels.head.matmul import (
    SLICE_COLUMNS,
    accumulate,
    clear_row_ends,
    matmul_precision,
    on_huge_pages,
    project,
    tf32_unavailable,
)

__all__ = [
    "PRECISIONS",
    "SLICE_COLUMNS",
    "Head",
    "HeadLoRA",
    "Transform",
    "accumulate",
    "autocast_dtype",
    "check_device",
    "check_floating",
    "check_mask_range",
    "check_plain",
    "check_row_temperature",
    "check_target_range",
    "checked_head",
    "clear_row_ends",
    "first_derivative_only",
    "head_of",
    "logits_dtype",
    "matmul_precision",
    "mkl",
    "no_second_derivative",
    "on_huge_pages",
    "project",
    "row_temperature",
    "stats_dtype",
    "tf32_unavailable",
]
