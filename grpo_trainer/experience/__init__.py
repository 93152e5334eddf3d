"""From prompts to scored micro-batches: generate, reward, compare within groups, slice."""

from grpo_trainer.experience.adaptive_entropy import AdaptiveEntropy
from grpo_trainer.experience.advantages import compute_advantages
from grpo_trainer.experience.collector import Collector, Sinks
from grpo_trainer.experience.curriculum import Curriculum, training_prompts
from grpo_trainer.experience.overlap import Ahead
from grpo_trainer.experience.rollout_func import Interaction, RolloutFunction
