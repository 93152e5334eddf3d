"""Reward functions: finding, calling and checking them."""

from grpo_trainer.rewards.builtin import (
    BUILTIN_REWARDS,
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    no_reward,
    reasoning_accuracy_reward,
    text_of,
    think_format_reward,
)
from grpo_trainer.rewards.call import (
    RewardError,
    RewardFunction,
    RewardLog,
    columns_of,
    score,
)
from grpo_trainer.rewards.resolve import RewardModel, RewardSource, Tokenizers, resolve_rewards
