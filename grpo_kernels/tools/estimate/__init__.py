"""Estimates of a head's peak memory and time, from formulas: nothing of the loss is run."""

from grpo_kernels.tools.estimate.memory import (
    HeadShape,
    MemoryEstimate,
    default_schedule,
    estimate_memory,
)

__all__ = ["HeadShape", "MemoryEstimate", "default_schedule", "estimate_memory"]
