"""From prompts to scored micro-batches: generate, reward, compare within groups, split."""

from grpo_trainer.experience.advantages import (
    AdaptiveEntropy,
    AdvantageFunction,
    compute_advantages,
    rollout_metrics,
)
from grpo_trainer.experience.columns import (
    fill_columns,
    old_logprobs,
    reference_logprobs,
    teacher_advantages,
)
from grpo_trainer.experience.comparisons import (
    ADVANTAGES,
    PassAtK,
    maxrl,
    reinforce_plus_plus,
    rloo,
)
from grpo_trainer.experience.completed import align_columns, any_process, check_samples
from grpo_trainer.experience.curriculum import Curriculum
from grpo_trainer.experience.deal import deal, leave_out_inactive
from grpo_trainer.experience.overlap import BatchesAhead, GroupsAhead
from grpo_trainer.experience.parts import Plan
from grpo_trainer.experience.prompts import DatasetPrompts, samples_of, share
from grpo_trainer.experience.rollout_func import ByFunction, RolloutFunction, check_rollout_func
from grpo_trainer.experience.scoring import Comparison, fill, measure
from grpo_trainer.experience.single_turn import SingleTurn
