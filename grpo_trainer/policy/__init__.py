"""The policy: loading, adapters, the reference model, forward passes, where its parameters are."""

from grpo_trainer.policy.adapters import base_policy, load_adapters
from grpo_trainer.policy.forward import evaluating, policy_loss_of, target_logprobs
from grpo_trainer.policy.load import (
    check_images_run,
    check_processor,
    load_older_names,
    load_policy,
    load_processing_class,
    loading,
    router_coef,
)
from grpo_trainer.policy.placement import WHOLE, Placement, loading_whole
from grpo_trainer.policy.reference import Reference, make_reference
from grpo_trainer.policy.sharded import check_placement, placement_of
