"""Estimates of a head's peak memory and time, from formulas: nothing of the loss is run."""

from grpo_kernels.tools.estimate.call import HeadShape
from grpo_kernels.tools.estimate.memory import (
    MemoryEstimate,
    default_schedule,
    estimate_memory,
    what_is_kept,
)
from grpo_kernels.tools.estimate.shard import SHARDS, read_shard
