"""The policy: loading, adapters, the reference model, forward passes.

May know ``common``, ``config`` and ``data``.
"""

from grpo_trainer.model.adapters import base_policy, load_adapters
from grpo_trainer.model.forward import evaluating, policy_loss_of, target_logprobs
from grpo_trainer.model.load import check_placement, load_policy, load_tokenizer, router_coef
from grpo_trainer.model.reference import Reference, SyncReference, make_reference
