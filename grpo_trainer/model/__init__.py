"""The policy: loading, adapters, the reference model, forward passes.

May know ``common``, ``config`` and ``data``.
"""

from grpo_trainer.model.adapters import base_policy, load_adapters
from grpo_trainer.model.forward import policy_loss_of, target_logprobs
from grpo_trainer.model.load import load_policy, load_tokenizer
from grpo_trainer.model.placement import check_placement
from grpo_trainer.model.reference import Reference, SyncReference, make_reference
from grpo_trainer.model.router import router_coef

__all__ = [
    "Reference",
    "SyncReference",
    "base_policy",
    "check_placement",
    "load_adapters",
    "load_policy",
    "load_tokenizer",
    "make_reference",
    "policy_loss_of",
    "router_coef",
    "target_logprobs",
]
