"""Reads what a layer multiplies hidden states with: a linear layer, plain or under PEFT's adapters.

Layers are of any module class, PEFT's included, which is not imported here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grpo_kernels.head.gathered import is_sharded, why_not_whole
from grpo_kernels.head.head import Head, HeadLoRA, Transform


def head_of_layer(layer: Any, transform: Transform) -> Head:
    """Return the layer's parameters as they are now, its active LoRA adapters as one.

    Raises:
        ValueError: the layer is not linear, is quantised, or carries an adapter that is not plain
            LoRA: LoRA with dropout, DoRA, or one of another kind.
    """
    layer = layer_in_use(layer)
    adapted = hasattr(layer, "base_layer")
    base = layer.base_layer if adapted else layer
    weight = getattr(base, "weight", None)
    # a quantised weight is packed: it has no (V, D) floating point numbers
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise ValueError(
            f"lm_head: expected a plain linear layer, got {type(base).__name__}; if it is "
            "quantised, leave it out of the quantisation"
        )
    if weight.dim() != 2 and not is_sharded(weight):
        raise ValueError(
            f"lm_head: expected a weight of shape (V, D), got {tuple(weight.shape)}"
            f"{why_not_whole(weight)}"
        )
    lora = _lora(layer) if adapted else None
    return Head(weight, getattr(base, "bias", None), transform, lora)


def layer_in_use(layer: Any) -> Any:
    """Look through PEFT's wrapper of a fully trained copy of the head (``modules_to_save``)."""
    if not hasattr(layer, "original_module"):
        return layer
    active = [] if layer.disable_adapters else layer.active_adapters
    copies = getattr(layer, "modules_to_save", None)
    if copies is None:
        raise ValueError(
            f"lm_head: expected one that is trained as a whole or by LoRA, got "
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
            f"lm_head: expected plain LoRA without dropout, got {problem}; change it "
            "or exclude the head from target_modules"
        )
