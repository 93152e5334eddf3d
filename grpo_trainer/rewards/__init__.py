"""Reward functions: how they are found, called and checked."""

from grpo_trainer.rewards.builtin import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)
from grpo_trainer.rewards.call import RewardFunction, RewardLog, score
from grpo_trainer.rewards.model import RewardModel
from grpo_trainer.rewards.resolve import BUILTIN_REWARDS, RewardSource, Tokenizers, resolve_rewards

__all__ = [
    "BUILTIN_REWARDS",
    "RewardFunction",
    "RewardLog",
    "RewardModel",
    "RewardSource",
    "Tokenizers",
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "resolve_rewards",
    "score",
    "think_format_reward",
]
