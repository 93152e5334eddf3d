"""The load-balancing loss of mixture-of-experts models."""

from __future__ import annotations

from transformers import PreTrainedModel

from grpo_kernels.hf.router import has_router_loss
from grpo_trainer.config import GRPOConfig


def router_coef(model: PreTrainedModel, args: GRPOConfig) -> float:
    """The weight of the model's router loss: the argument's, or else that of the model's config.

    Raises:
        ValueError: a weight is asked for and the model has no such loss.
    """
    wanted = args.router_aux_loss_coef
    if has_router_loss(model):
        own = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)
        return own if wanted is None else wanted
    if wanted:
        raise ValueError(
            "router_aux_loss_coef: expected None or 0 with a model without a load-balancing loss "
            f"of its routers, got {wanted} for {type(model).__name__}"
        )
    return 0.0
