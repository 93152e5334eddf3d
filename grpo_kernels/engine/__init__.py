"""The loop over rows: logits, statistics and gradients of a head. Knows backends, no loss."""

from grpo_kernels.engine.bounded import REPORT, BoundedSums, bounded_report, of_kept
from grpo_kernels.engine.differentiable import (
    INPUTS,
    differentiable_stats,
    rows_backward,
    rows_forward,
    stats_backward,
)
from grpo_kernels.engine.fingerprint import fingerprint
from grpo_kernels.engine.gradients import Gradients, GradientSums, MainGrad, Needs
from grpo_kernels.engine.kept import ENTRIES, OF_ENTROPY, OF_MASK, Keeping, kept_gradients
from grpo_kernels.engine.ops import (
    compiled_stats,
    linear_logprobs_backward,
    linear_logprobs_forward,
)
from grpo_kernels.engine.options import OPTIONS_SCHEMA, Bounded, RunOptions
from grpo_kernels.engine.plan import LogprobsPlan
from grpo_kernels.engine.recompute import tile_shape
from grpo_kernels.engine.retry import with_less_memory
from grpo_kernels.engine.route import Route, choose_route, row_block
from grpo_kernels.engine.rows import Rows
from grpo_kernels.engine.shards import agree, telling_others
from grpo_kernels.engine.sweep import chunk_height, row_chunks, sweep, tile_height
