"""Rollout engines: they turn prompts into completions."""

from grpo_trainer.rollout.base import (
    BackgroundEngine,
    Completions,
    EngineContext,
    Pending,
    RolloutEngine,
    Sampling,
    WeightsLostError,
    WeightSource,
    cut_after_eos,
)
from grpo_trainer.rollout.registry import make_rollouts, register_rollout_engine
from grpo_trainer.rollout.sync import Rollouts, Started
from grpo_trainer.rollout.transformers import TransformersEngine

__all__ = [
    "BackgroundEngine",
    "Completions",
    "EngineContext",
    "Pending",
    "RolloutEngine",
    "Rollouts",
    "Sampling",
    "Started",
    "TransformersEngine",
    "WeightSource",
    "WeightsLostError",
    "cut_after_eos",
    "make_rollouts",
    "register_rollout_engine",
]
