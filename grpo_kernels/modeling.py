"""Puts a fused head into a transformers model's own forward, so that wrappers and hooks fire."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class LMHead(NamedTuple):
    """What a model's LM head is made of: ``softcap * tanh(scale * logits / softcap)``."""

    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    logit_scale: float
    softcap: float | None


HeadFn = Callable[[Tensor, LMHead], Any]

# config attribute -> the factor on the logits that it stands for, by model family
_SCALES: dict[str, Callable[[float], float]] = {
    "logit_scale": lambda value: value,  # Cohere
    "output_multiplier": lambda value: value,  # Muse Glimmer
    "lm_head_multiplier": lambda value: value,  # Falcon-H1
    "logits_scaling": lambda value: 1.0 / value,  # Granite, MiniCPM3
}
_MULTIPLIES_BY_LOGITS_SCALING = ("hyperclovax",)


def add_fused_head(model: PreTrainedModel) -> None:
    """Teaches ``model`` the keyword argument ``head_fn``; call it before any wrapper is applied.

    ``model(input_ids=..., attention_mask=..., head_fn=fn)`` runs the backbone and returns a
    ``ModelOutput`` whose ``head`` is ``fn(hidden, LMHead)``, with ``hidden`` (B, L, D), in place of
    the logits. Without ``head_fn`` the forward is the model's own. Calling it twice is harmless.

    Raises:
        ValueError: the model has no output embeddings, or no separate backbone.
    """
    if getattr(model, "_grpo_fused_head", False):
        return
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"model: expected a causal LM with output embeddings, got {type(model).__name__}"
        )
    if model.base_model is model:
        raise ValueError(f"model: expected a model with a head, got {type(model).__name__}")
    own_forward = model.forward

    # the original signature stays visible: `generate` and `Trainer` inspect it
    @functools.wraps(own_forward)
    def forward(*args: Any, head_fn: HeadFn | None = None, **kwargs: Any) -> Any:
        if head_fn is None:
            return own_forward(*args, **kwargs)
        return _head_forward(model, head_fn, args, kwargs)

    model.forward = forward
    model._grpo_fused_head = True


def lm_head(model: PreTrainedModel) -> LMHead:
    """The head's parameters and the logit transform that the model's config declares.

    Raises:
        ValueError: the head is not a plain linear layer (for example under a LoRA adapter).
    """
    layer = model.get_output_embeddings()
    weight = getattr(layer, "weight", None)
    if hasattr(layer, "base_layer") or weight is None or weight.dim() != 2:
        raise ValueError(
            f"model: expected a plain linear LM head, got {type(layer).__name__}; "
            "exclude the head from the adapter's target modules"
        )
    config = model.config.get_text_config()
    return LMHead(weight, getattr(layer, "bias", None), logit_scale(config), _softcap(config))


def logit_scale(config: PretrainedConfig) -> float:
    """The factor on the logits, 1.0 where the family has none."""
    for name, factor in _SCALES.items():
        value = getattr(config, name, None)
        if value is None:
            continue
        if name == "logits_scaling" and config.model_type in _MULTIPLIES_BY_LOGITS_SCALING:
            return float(value)
        return factor(float(value))
    return 1.0


def _softcap(config: PretrainedConfig) -> float | None:
    value = getattr(config, "final_logit_softcapping", None)
    return None if value is None else float(value)


def _head_forward(
    model: PreTrainedModel, head_fn: HeadFn, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    kwargs["use_cache"] = False
    outputs = model.base_model(*args, **kwargs)
    # looked up on every call: wrappers may replace backbone and head after patching
    head = lm_head(model)
    hidden = outputs.last_hidden_state.to(head.weight.device)
    return _output_class()(head=head_fn(hidden, head))


@functools.cache
def _output_class() -> type:
    # transformers is imported only by those who use it
    from transformers.utils import ModelOutput

    @dataclass
    class FusedHeadOutput(ModelOutput):
        """The result of ``head_fn``."""

        head: Any = None

    return FusedHeadOutput
