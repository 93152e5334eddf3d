"""Row kernels for each device. Independent of the loss.

Triton kernels have a separate entry, which imports Triton: :mod:`grpo_kernels.backends.triton`.
"""

from grpo_kernels.backends import cpu
from grpo_kernels.backends.base import (
    ANY_ERROR,
    EXTRAS,
    LEAST_LOGP,
    WHOLE,
    Entries,
    OutputSpec,
    RowStats,
    StatsGrad,
    Tile,
    TileGradient,
    concatenate,
    dtype_of,
    output_view,
    shapes_of,
    slope,
    transformed,
)
from grpo_kernels.backends.choice import (
    BACKEND_VARIABLE,
    BACKENDS,
    available_backends,
    choose_backend,
    chunk_rows,
    device_numerics,
    requested_backend,
    why_backend,
)
from grpo_kernels.backends.divergence import KINDS, Divergence, Pair, TopK
from grpo_kernels.backends.entries import row_weights
from grpo_kernels.backends.packing import kernel_packing
from grpo_kernels.backends.reference import reference_divergence, reference_logprobs
from grpo_kernels.backends.topk import mean_logits, with_top_k
from grpo_kernels.backends.torch_backend import Backend
