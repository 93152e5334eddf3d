"""The LM head of a transformers model as a FusedHead, with the scale and softcap of its config."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_kernels.fused_head import FusedHead
from grpo_kernels.head import layer_in_use

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


# config attributes that the logits are multiplied or divided by, by family
_MULTIPLIERS = (
    "logit_scale",  # Cohere
    "output_multiplier",  # Muse Glimmer
    "lm_head_multiplier",  # Falcon-H1
)
_DIVISORS = (
    "logits_scaling",  # Granite, MiniCPM3
    "logits_mup_width_multiplier",  # Inkling
)
_SOFTCAPS = (
    "final_logit_softcapping",  # Gemma
    "logits_soft_cap",  # RecurrentGemma
    "output_logit_soft_cap",  # xLSTM
)
_MULTIPLIES_BY_LOGITS_SCALING = ("hyperclovax",)
_DECLARES_A_SCALE_IT_DOES_NOT_APPLY = ("mpt",)


def fuse_head(model: PreTrainedModel) -> nn.Module:
    """Make the output embeddings of ``model`` a :class:`FusedHead`, as its config describes them.

    Return what to call: that layer, or FSDP1's wrapper of it.
    """
    config = model.config.get_text_config()
    layer = model.get_output_embeddings()
    FusedHead(
        getattr(layer, "_fsdp_wrapped_module", layer),
        logit_scale=logit_scale(config),
        softcap=softcap(config),
        vocab_size=getattr(config, "unpadded_vocab_size", None),  # Inkling's logits end there
    )
    return layer


def fused_head(model: PreTrainedModel) -> nn.Module:
    """Return the head to call; wrappers may have replaced the one that was fused."""
    layer = model.get_output_embeddings()
    fused = isinstance(getattr(layer, "_fsdp_wrapped_module", layer), FusedHead)
    return layer if fused else fuse_head(model)


def logit_scale(config: PretrainedConfig) -> float:
    """Return the factor on the logits, 1.0 where the family has none."""
    if config.model_type in _DECLARES_A_SCALE_IT_DOES_NOT_APPLY:
        return 1.0
    for name in (*_MULTIPLIERS, *_DIVISORS):
        value = getattr(config, name, None)
        if value is None:
            continue
        divides = name in _DIVISORS and config.model_type not in _MULTIPLIES_BY_LOGITS_SCALING
        return 1.0 / float(value) if divides else float(value)
    return 1.0


def softcap(config: PretrainedConfig) -> float | None:
    """Return the softcap of the logits, None where the family has none."""
    for name in _SOFTCAPS:
        value = getattr(config, name, None)
        if value is not None:
            return float(value)
    return None


def keep_head_in_fp32(model: PreTrainedModel) -> None:
    """Make the head's weight fp32, and hand fp32 hidden states to ``head_fn``, without autocast.

    The model's own forward, with which it generates, takes hidden states of any dtype as before.

    Raises:
        ValueError: the weight is of lower precision and shared with the embeddings, whose output
            would change with it.
    """
    layer = model.get_output_embeddings()
    if layer.weight.dtype != torch.float32:
        if layer.weight is model.get_input_embeddings().weight:
            raise ValueError(
                "cast_lm_head_to_fp32: expected a head of its own, or fp32 weights, got "
                f"{layer.weight.dtype} shared with the embeddings"
            )
        layer.float()
    layer.register_forward_pre_hook(_fp32_input)
    layer._grpo_fp32_head = True


def runs_in_fp32(model: PreTrainedModel) -> bool:
    """Return whether autocast must not round the head's inputs: after :func:`keep_head_in_fp32`."""
    layer = layer_in_use(model.get_output_embeddings())
    marked = (layer, getattr(layer, "base_layer", None))  # an adapter may have come later
    return any(getattr(one, "_grpo_fp32_head", False) for one in marked)


def _fp32_input(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0].float(), *args[1:])
