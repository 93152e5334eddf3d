"""Reward functions: how they are found, called and checked."""

from grpo_trainer.rewards.builtin import BUILTIN_REWARDS
from grpo_trainer.rewards.call import RewardFunction, score
from grpo_trainer.rewards.resolve import resolve_rewards

__all__ = ["BUILTIN_REWARDS", "RewardFunction", "resolve_rewards", "score"]
