"""The loop over rows: logits, statistics and gradients of a head. Independent of the loss."""

from grpo_kernels.engine.autograd import INPUTS, Forward, HeadCall, Tensors, apply
from grpo_kernels.engine.bounded import BoundedSums, bounded_gradients
from grpo_kernels.engine.chosen_entries import (
    REPORT,
    bounded_report,
    pack_entries,
    saved_entries,
    unpack_entries,
)
from grpo_kernels.engine.chunked_loop import (
    Chunk,
    chunk_height,
    chunked_loop,
    row_chunks,
    tile_height,
)
from grpo_kernels.engine.compiled_logprobs import (
    CALL_SCHEMA,
    INPUTS_SCHEMA,
    NUM_CALL,
    NUM_INPUTS,
    call_arguments,
    call_of_arguments,
    compiled_stats,
    linear_logprobs_backward,
    linear_logprobs_forward,
)
from grpo_kernels.engine.differentiable import (
    differentiable_stats,
    rows_forward,
    stats_backward,
)
from grpo_kernels.engine.divergence import (
    DivergencePlan,
    differentiable_divergence,
    plan_divergence,
)
from grpo_kernels.engine.explain import (
    backend_reasons,
    fingerprint,
    saved_words,
    sparse_words,
)
from grpo_kernels.engine.gradients import GradientSums, gradients_of_logp, scaled_, tile_shape
from grpo_kernels.engine.logprobs_plan import (
    ENTRIES,
    ENTRY_ROWS,
    OF_ENTROPY,
    OF_MASK,
    CallPlan,
    LogprobsPlan,
    SavedForBackward,
    needs_of_gemms,
)
from grpo_kernels.engine.options import Bounded, RunOptions
from grpo_kernels.engine.retry_on_oom import retry_on_oom
from grpo_kernels.engine.route import Route, choose_route
from grpo_kernels.engine.rows import Gradients, Needs, Rows, Selection
from grpo_kernels.engine.shards import check_ranks_agree, raise_on_all_ranks
from grpo_kernels.engine.weight_sum import WeightGrad
