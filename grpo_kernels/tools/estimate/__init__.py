"""Predictions of a head's peak memory and time, from formulas: nothing of the loss is run."""

from grpo_kernels.tools.estimate.memory import (
    IMPLEMENTATIONS,
    MemoryPrediction,
    largest_micro_batch,
    predict_head_memory,
)
from grpo_kernels.tools.estimate.shape import HeadShape
from grpo_kernels.tools.estimate.speed import GPUS, Speed, datasheet, find_gpu, measured
from grpo_kernels.tools.estimate.time import predict_head_work
from grpo_kernels.tools.estimate.work import Work

__all__ = [
    "GPUS",
    "IMPLEMENTATIONS",
    "HeadShape",
    "MemoryPrediction",
    "Speed",
    "Work",
    "datasheet",
    "find_gpu",
    "largest_micro_batch",
    "measured",
    "predict_head_memory",
    "predict_head_work",
]
