"""Rollout engines: they turn prompts into completions."""

from grpo_trainer.rollout.base import (
    Completions,
    EngineContext,
    RolloutEngine,
    Sampling,
    WeightSource,
    cut_after_eos,
)
from grpo_trainer.rollout.registry import make_rollouts, register_rollout_engine
from grpo_trainer.rollout.sync import Rollouts
from grpo_trainer.rollout.transformers import TransformersEngine

__all__ = [
    "Completions",
    "EngineContext",
    "RolloutEngine",
    "Rollouts",
    "Sampling",
    "TransformersEngine",
    "WeightSource",
    "cut_after_eos",
    "make_rollouts",
    "register_rollout_engine",
]
