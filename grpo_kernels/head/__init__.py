"""The LM head, its checks, and GEMMs that accumulate in fp32. Independent of the loss."""

from grpo_kernels.head.checks import (
    autocast_dtype,
    check_floating,
    check_local,
    check_mask_range,
    check_plain,
    check_target_range,
    check_weight,
    checked_head,
    first_derivative_only,
    head_of,
    no_second_derivative,
    row_temperature,
)
from grpo_kernels.head.head import (
    Head,
    HeadLoRA,
    Transform,
    VocabShard,
    emptied,
    logits_dtype,
    stats_dtype,
)
from grpo_kernels.head.matmul import (
    SLICE_COLUMNS,
    accumulate,
    leading_dim,
    matmul_precision,
    project,
    zero_row_padding,
)
from grpo_kernels.head.parameters import DividedGradient, head_of_layer, layer_in_use, unshard_head
