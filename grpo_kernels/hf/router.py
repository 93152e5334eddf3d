"""The load-balancing loss of a transformers mixture-of-experts model, from its router's logits."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOSS = "load_balancing_loss_func"  # its name in the modeling file of each family


def has_router_loss(model: PreTrainedModel) -> bool:
    """Return whether the family of ``model`` balances the load of its experts by a loss."""
    config = model.config.get_text_config()
    return hasattr(config, "output_router_logits") and hasattr(_family(model), _LOSS)


def router_loss(model: PreTrainedModel, outputs: Any, attention_mask: Tensor | None) -> Tensor:
    """Return the loss, (), of what the backbone returned with ``output_router_logits=True``."""
    config = model.config.get_text_config()
    experts = getattr(model, "num_experts", None) or config.num_experts
    return getattr(_family(model), _LOSS)(
        outputs.router_logits, experts, config.num_experts_per_tok, attention_mask
    )


def _family(model: PreTrainedModel) -> Any:
    return sys.modules[type(model).__module__]
