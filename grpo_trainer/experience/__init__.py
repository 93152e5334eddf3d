"""From prompts to scored micro-batches: generate, reward, compare within groups, slice.

May know every room but ``checkpoint``, ``model``, ``cli`` and ``demo``.
"""

from grpo_trainer.experience.adaptive_entropy import AdaptiveEntropy
from grpo_trainer.experience.advantages import compute_advantages
from grpo_trainer.experience.collector import Collector, Sinks
from grpo_trainer.experience.overlap import Ahead
from grpo_trainer.experience.rollout_func import RolloutFunction
from grpo_trainer.experience.sources import Interaction
