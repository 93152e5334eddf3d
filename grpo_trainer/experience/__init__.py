"""From prompts to scored micro-batches: generate, reward, compare within groups, slice."""

from grpo_trainer.experience.advantages import (
    AdaptiveEntropy,
    AdvantageFunction,
    compute_advantages,
    rollout_metrics,
)
from grpo_trainer.experience.collector import Collector, Scored
from grpo_trainer.experience.comparisons import (
    ADVANTAGES,
    PassAtK,
    maxrl,
    reinforce_plus_plus,
    rloo,
)
from grpo_trainer.experience.curriculum import Curriculum, training_prompts
from grpo_trainer.experience.overlap import BatchesAhead
from grpo_trainer.experience.rollout_func import RolloutFunction, check_rollout_func, samples_by
