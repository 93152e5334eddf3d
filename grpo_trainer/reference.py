"""The reference model of the KL penalty: a frozen copy of the policy at the start."""

from __future__ import annotations

import copy

from transformers import PreTrainedModel

from grpo_kernels.modeling import add_fused_head


def frozen_reference(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``model`` in evaluation mode, without gradients, with its own fused head.

    Raises:
        ValueError: the model has a fused head already. What is attached to a forward stays bound to
            the model it was attached to, so a copy would silently run the policy.
    """
    if "forward" in vars(model):
        raise ValueError(
            "model: expected one whose forward is unchanged, so that the reference of beta != 0 "
            "can be copied from it; got a patched forward (was it used by a trainer before?)"
        )
    reference = copy.deepcopy(model)
    reference.requires_grad_(False)
    add_fused_head(reference)
    return reference.eval()
