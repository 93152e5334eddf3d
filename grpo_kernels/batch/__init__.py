"""The inputs of a loss: the valid tokens of a rollout, packed and checked."""

from grpo_kernels.batch import host
from grpo_kernels.batch.inputs import (
    CHECKED,
    IGNORE_INDEX,
    SCALAR_FIELDS,
    TOKEN_FIELDS,
    UNKNOWN,
    BatchInputs,
)
from grpo_kernels.batch.packing import PACKERS, Findings, Packing, ValidTokens
from grpo_kernels.batch.sampling_mask import MASK_FIELDS, SamplingMask, check_sampling_mask
from grpo_kernels.batch.segments import (
    RankRows,
    Segments,
    context_parallel_rows,
    next_token_targets,
)
from grpo_kernels.batch.token_batch import TokenBatch
