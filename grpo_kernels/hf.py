"""The same inside transformers models: the head of a model, its forward, and a check of both.

:func:`add_fused_head` puts a fused head into a model's own forward, so that wrappers and hooks
fire, with the scale and softcap of the model's config. :func:`check_fused_head` compares that idea
of the model with its own logits, before it is trusted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from grpo_kernels.fused_head import FusedHead, HeadFn
from grpo_kernels.head import Head, layer_in_use
from grpo_kernels.overlay import ForwardOverlay, lay_over

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
_PATCHED = "_grpo_patched_forward"  # attribute: the forward that was set on a model before
_BALANCING_LOSS = "load_balancing_loss_func"  # its name in the modeling file of each family
_TOKENS = 4
_LARGE = 64.0  # logits of this size show every softcap in use
_TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.03}  # of the largest logit; fp32: below
_TIGHT = 1e-3


def add_fused_head(model: PreTrainedModel) -> None:
    """Teach ``model`` the keyword argument ``head_fn``; call it before any wrapper is applied.

    ``model(input_ids=..., attention_mask=..., head_fn=fn)`` runs the backbone and returns a
    ``ModelOutput`` whose ``head`` is ``fn(hidden, Head)``, with ``hidden`` (B, L, D), in place of
    the logits. Without ``head_fn`` the forward is the model's own. Calling it twice is harmless.
    The output embeddings become a :class:`grpo_kernels.FusedHead`. Copies of the model have a head
    of their own.

    Raises:
        ValueError: the model has no output embeddings, or no separate backbone.
    """
    if isinstance(model, _TakesHeadFn):
        return
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"model: expected a causal LM with output embeddings, got {type(model).__name__}"
        )
    backbone(model)
    fuse_head(model)
    if "forward" in vars(model):  # it would hide that of a class
        vars(model)[_PATCHED] = vars(model).pop("forward")
    lay_over(_TakesHeadFn, model)


def is_patched(model: PreTrainedModel) -> bool:
    """Return whether a forward was set on this model, other than by :func:`add_fused_head`."""
    return "forward" in vars(model) or _PATCHED in vars(model)


def drop_wrappers(model: PreTrainedModel) -> None:
    """Drop what was set around the forward of ``model`` since :func:`add_fused_head`, if that was
    called."""
    if isinstance(model, _TakesHeadFn):
        vars(model).pop("forward", None)


class _TakesHeadFn(ForwardOverlay):
    """What :func:`add_fused_head` makes of a model."""

    def forward(self, *args: Any, head_fn: HeadFn | None = None, **kwargs: Any) -> Any:
        if head_fn is not None:
            return _head_forward(self, head_fn, args, kwargs)
        own_forward = super().forward
        return vars(self).get(_PATCHED, own_forward)(*args, **kwargs)


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return the part of ``model`` that gives the last hidden states.

    Raises:
        ValueError: there is none.
    """
    if model.base_model is not model:
        return model.base_model
    part = getattr(model, "model", None)  # Llama 4's text model, whose prefix names another part
    if not isinstance(part, nn.Module):
        raise ValueError(f"model: expected a model with a head, got {type(model).__name__}")
    return part


def _head_forward(
    model: PreTrainedModel, head_fn: HeadFn, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if kwargs.get("labels") is not None:
        raise ValueError("labels: expected None with head_fn (it makes the loss), got a value")
    # wrappers pass on every argument of a causal LM, as None where it was not given; a backbone
    # need not know it
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    kwargs["use_cache"] = False
    outputs = backbone(model)(*args, **kwargs)
    routers = None
    if kwargs.get("output_router_logits"):
        routers = moe_aux_loss(model, outputs, kwargs.get("attention_mask"))
    head = _call_head(model, outputs.last_hidden_state, head_fn)
    return _output_class()(aux_loss=routers, head=head)


def _call_head(model: PreTrainedModel, hidden: Tensor, head_fn: HeadFn) -> Any:
    head = fused_head(model)
    if not runs_in_fp32(model):
        return head(hidden, head_fn)

    def exact(hidden: Tensor, head: Head) -> Any:
        return head_fn(hidden.to(head.weight.dtype), head)

    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden, exact)


@functools.cache
def _output_class() -> type:
    # transformers is imported only by those who use it
    from transformers.utils import ModelOutput

    @dataclass
    class FusedHeadOutput(ModelOutput):
        """The result of ``head_fn``, and the routers' loss if their logits were asked for."""

        # the first field must not be `head`: a dict there is taken for the fields themselves
        aux_loss: Tensor | None = None
        head: Any = None

    return FusedHeadOutput


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
    values = (getattr(config, name, None) for name in _SOFTCAPS)
    return next((float(value) for value in values if value is not None), None)


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


def has_moe_aux_loss(model: PreTrainedModel) -> bool:
    """Return whether the family of ``model`` balances the load of its experts by a loss."""
    config = model.config.get_text_config()
    return hasattr(config, "output_router_logits") and hasattr(_family(model), _BALANCING_LOSS)


def moe_aux_loss(model: PreTrainedModel, outputs: Any, attention_mask: Tensor | None) -> Tensor:
    """Return the loss, (), of what the backbone returned with ``output_router_logits=True``."""
    config = model.config.get_text_config()
    experts = getattr(model, "num_experts", None) or config.num_experts
    return getattr(_family(model), _BALANCING_LOSS)(
        outputs.router_logits, experts, config.num_experts_per_tok, attention_mask
    )


def _family(model: PreTrainedModel) -> Any:
    return sys.modules[type(model).__module__]


def check_fused_head(model: PreTrainedModel, wrapper: nn.Module | None = None) -> None:
    """Raise unless the fused head of ``model`` describes how it makes its logits.

    Two forwards over a few tokens: the model's own, and one with ``head_fn``. In both the last
    hidden states are enlarged until the logits are large, so that a scale, a bound, a bias or a
    step between backbone and head that is not understood shows whatever the weights are.

    Args:
        model: one that :func:`add_fused_head` was applied to, where its weights are in use.
        wrapper: what is called to run it (PEFT's, FSDP's, DeepSpeed's), once it is sharded.

    Raises:
        ValueError: the logits differ.
    """
    device = model.get_input_embeddings().weight.device
    ids = torch.full((1, _TOKENS), _some_token(model), device=device)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    runs = model if wrapper is None else wrapper
    seen: list[Tensor] = []  # kept from hooks on the head, which would change a loss as well

    def note(hidden: Tensor, head: Head) -> Tensor:
        seen.append(_eager_logits(hidden, head))
        return seen[0]

    with torch.no_grad(), _evaluating(model), _enlarged(model) as factor:
        own = runs(**batch, use_cache=False).logits
        if not factor:  # its forward does not call the backbone
            factor.append(1.0)
        runs(**batch, head_fn=note)
    (fused,) = seen
    if own.shape != fused.shape:
        difference = f"shape {tuple(own.shape)} against {tuple(fused.shape)}"
    else:
        error = (own.to(fused) - fused).abs().max() / fused.abs().max()
        if error <= _TOLERANCE.get(own.dtype, _TIGHT):
            return
        difference = f"a relative error of {float(error):.1e}"
    raise ValueError(
        f"model: expected logits softcap * tanh(scale * (W h + b) / softcap) of the last hidden "
        f"states, as its config declares them, but {type(model).__name__} makes others "
        f"({difference}): its head is not supported"
    )


@contextmanager
def _enlarged(model: PreTrainedModel) -> Iterator[list[float]]:
    """Multiply the last hidden states by a power of two, which the first forward finds.

    Yield what holds it from then on.
    """
    factor: list[float] = []

    def enlarge(module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        if not factor:
            scaled = fused_head(model)(hidden, _scaled_logits)
            largest = scaled.abs().max().float().clamp(min=1e-6)
            factor.append(float(torch.exp2((_LARGE / largest).log2().round())))
        output.last_hidden_state = hidden * factor[0]
        return output

    handle = backbone(model).register_forward_hook(enlarge)
    try:
        yield factor
    finally:
        handle.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off and leave the random state as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        model.train(was_training)


def _scaled_logits(hidden: Tensor, head: Head) -> Tensor:
    """Return logits in fp32, without softcap."""
    hidden = hidden.float()
    logits = linear(hidden, head.weight.float(), None if head.bias is None else head.bias.float())
    if head.lora is not None:
        inner = linear(hidden, head.lora.a.float()) * head.lora.scaling
        logits = logits + linear(inner, head.lora.b.float())
    return logits * head.transform.logit_scale


def _eager_logits(hidden: Tensor, head: Head) -> Tensor:
    logits, bound = _scaled_logits(hidden, head), head.transform.softcap
    return logits if bound is None else bound * torch.tanh(logits / bound)


def _some_token(model: PreTrainedModel) -> int:
    """Return a token that stands for text; the padding token's embedding may be zero."""
    config = model.config.get_text_config()
    named = [getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")]
    padding = getattr(config, "pad_token_id", None)
    return next(x for x in (*named, 1, 0) if isinstance(x, int) and x != padding)
