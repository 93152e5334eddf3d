"""A GRPO training step of a small real-shaped model: our trainer beside TRL's."""

from benchmarks.training.measure import measure_training
from benchmarks.training.providers import PROVIDERS
from benchmarks.training.task import FULL, FULL_GPU, QUICK, TrainingConfig, choose

__all__ = [
    "FULL",
    "FULL_GPU",
    "PROVIDERS",
    "QUICK",
    "TrainingConfig",
    "choose",
    "measure_training",
]
