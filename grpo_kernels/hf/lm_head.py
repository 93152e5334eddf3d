"""What the LM head of a transformers model computes: parameters, adapters and the logits' scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_kernels.head import Head, HeadLoRA, Transform

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


def lm_head(model: PreTrainedModel) -> Head:
    """Return the head's parameters, and the logit transform that the model's config declares.

    Active LoRA adapters of the head are in ``lora``, as one.

    Raises:
        ValueError: the head is not a linear layer, is quantised, or carries an adapter that is not
            plain LoRA: LoRA with dropout, DoRA, or one of another kind.
    """
    config = model.config.get_text_config()
    weight, bias, lora = _parameters(model.get_output_embeddings())
    size = getattr(config, "unpadded_vocab_size", None)  # Inkling's logits end there
    if size is not None and size < weight.shape[0]:
        weight, bias = weight[:size], None if bias is None else bias[:size]
        lora = None if lora is None else lora.columns(slice(size))
    return Head(weight, bias, Transform(logit_scale(config), softcap(config)), lora)


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
    layer = _layer_in_use(model.get_output_embeddings())
    marked = (layer, getattr(layer, "base_layer", None))  # an adapter may have come later
    return any(getattr(one, "_grpo_fp32_head", False) for one in marked)


def _fp32_input(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0].float(), *args[1:])


# layers are of any module class, PEFT's included, which is not imported here


def _parameters(layer: Any) -> tuple[Tensor, Tensor | None, HeadLoRA | None]:
    layer = _layer_in_use(layer)
    adapted = hasattr(layer, "base_layer")
    base = layer.base_layer if adapted else layer
    weight = getattr(base, "weight", None)
    # a quantised weight is packed: it has no (V, D) floating point numbers
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"model: expected a plain linear LM head, got {type(base).__name__}; if it is "
            "quantised, leave it out of the quantisation"
        )
    return weight, getattr(base, "bias", None), _lora(layer) if adapted else None


def _layer_in_use(layer: Any) -> Any:
    """Look through PEFT's wrapper of a fully trained copy of the head (``modules_to_save``)."""
    if not hasattr(layer, "original_module"):
        return layer
    active = [] if layer.disable_adapters else layer.active_adapters
    copies = getattr(layer, "modules_to_save", None)
    if copies is None:
        raise ValueError(
            f"model: expected an LM head that is trained as a whole or by LoRA, got "
            f"{type(layer).__name__} (single tokens of it); use modules_to_save for the head"
        )
    names = [name for name in active if name in copies]
    return copies[names[0]] if names else layer.original_module


def _lora(layer: Any) -> HeadLoRA | None:
    """Return the adapters in use; None if there is none or they are merged into the weight."""
    if layer.merged or layer.disable_adapters:
        return None
    found = []
    for name in layer.active_adapters:
        _check_lora(layer, name)
        if name in layer.lora_A:
            factor_a, factor_b = layer.lora_A[name].weight, layer.lora_B[name].weight
            found.append(HeadLoRA(a=factor_a, b=factor_b, scaling=layer.scaling[name]))
    return HeadLoRA.joined(found)


def _check_lora(layer: Any, name: str) -> None:
    problem = None
    if not hasattr(layer, "lora_A") or hasattr(layer, "parameter_name"):
        problem = f"an adapter of type {type(layer).__name__}"
    elif name in layer.lora_A:
        if name in getattr(layer, "lora_variant", {}) or layer.use_dora.get(name):
            problem = "DoRA or another variant of LoRA"
        elif getattr(layer.lora_dropout[name], "p", 0.0) > 0:
            problem = f"lora_dropout={layer.lora_dropout[name].p}"
        elif layer.lora_B[name].bias is not None:
            problem = "lora_bias=True"
    if problem is not None:
        raise ValueError(
            f"model: expected plain LoRA without dropout on the LM head, got {problem}; change it "
            "or exclude the head from target_modules"
        )
