"""The policy: loading, adapters, the reference model, forward passes.

May know ``common``, ``config`` and ``data``.
"""

from grpo_trainer.model.adapters import base_policy, load_adapters
from grpo_trainer.model.forward import evaluating, policy_loss_of, target_logprobs
from grpo_trainer.model.load import (
    check_placement,
    has_own_names,
    load_policy,
    load_weights,
    router_coef,
)
from grpo_trainer.model.processing import (
    check_images_run,
    check_processor,
    load_processing_class,
    takes_images,
)
from grpo_trainer.model.reference import Reference, SyncReference, make_reference
