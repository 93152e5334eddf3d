"""Rollout engines: they turn prompts into completions."""

from grpo_trainer.rollout.base import RolloutEngine, cut_after_eos
from grpo_trainer.rollout.transformers import TransformersEngine

__all__ = ["RolloutEngine", "TransformersEngine", "cut_after_eos"]
