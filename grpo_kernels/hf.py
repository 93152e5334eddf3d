"""Fused heads in transformers models.

The head runs in the model's forward, so that wrappers and hooks run, with the scale and softcap of
the model's config. ``check_fused_head`` checks these against the model's own logits.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import make_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_kernels.common import ForwardOverlay, apply_overlay
from grpo_kernels.fused_head import FusedHead, HeadFn
from grpo_kernels.head import Head, layer_in_use, project

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# config attributes that scale the logits: True: a factor, False: a divisor
_SCALES = {
    "logit_scale": True,  # Cohere
    "output_multiplier": True,  # Muse Glimmer
    "lm_head_multiplier": True,  # Falcon-H1
    "logits_scaling": False,  # Granite, MiniCPM3
    "logits_mup_width_multiplier": False,  # Inkling
}
# by model type: families that use these differently, or declare one that they do not apply
_OTHER_SCALES: dict[str, dict[str, bool]] = {"hyperclovax": {"logits_scaling": True}, "mpt": {}}
_SOFTCAPS = (
    "final_logit_softcapping",  # Gemma
    "logits_soft_cap",  # RecurrentGemma
    "output_logit_soft_cap",  # xLSTM
)
# MLP classes in which each token's output depends only on that token
TOKEN_WISE_MLPS = (
    *("ApertusMLP", "ArceeMLP", "Cohere2MLP", "CohereMLP", "Ernie4_5MLP", "Exaone4MLP"),
    *("Gemma2MLP", "Gemma3MLP", "GemmaMLP", "Glm4MLP", "GlmMLP", "GraniteMLP", "HeliumMLP"),
    *("HunYuanDenseV1MLP", "LlamaMLP", "Ministral3MLP", "MinistralMLP", "MistralMLP"),
    *("NemotronMLP", "Olmo2MLP", "Olmo3MLP", "OlmoMLP", "Phi3MLP", "PhiMLP"),
    *("Qwen2MLP", "Qwen3MLP", "Qwen3VLTextMLP", "Qwen3_5MLP", "SeedOssMLP", "SmolLM3MLP"),
    *("StableLmMLP", "Starcoder2MLP", "VaultGemmaMLP"),
)
# config fields: the number of experts that process a token
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
_PATCHED = "_grpo_patched_forward"  # attribute: a forward that was set on the model earlier
_TOKENS = 4
_LARGE = 64.0  # logits of this size expose every softcap in use
# relative to the largest logit or hidden state
TOLERANCE = defaultdict(lambda: 1e-3, {torch.float16: 0.02, torch.bfloat16: 0.03})


def add_fused_head(model: PreTrainedModel) -> None:
    """Add the keyword argument ``head_fn`` to the forward of ``model``, before wrapping it.

    ``model(input_ids=..., attention_mask=..., head_fn=fn)`` runs the backbone and returns a
    ``ModelOutput`` with ``head=fn(hidden, Head)``, where ``hidden`` is (B, L, D), instead of the
    logits. Without ``head_fn`` the forward is unchanged. The output embeddings become a
    :class:`grpo_kernels.FusedHead`. Pass ``router_mask`` (B, L) if the tokens that count in the
    router loss differ from ``attention_mask``. Calling this function twice is harmless.

    Args:
        model: a causal LM of transformers. Call this before FSDP, DeepSpeed or another wrapper.

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
    fused_head(model, anew=True)
    if "forward" in vars(model):  # it would hide a class's forward
        vars(model)[_PATCHED] = vars(model).pop("forward")
    apply_overlay(_TakesHeadFn, model)


def is_patched(model: PreTrainedModel) -> bool:
    """Return whether anything but :func:`add_fused_head` has set a forward on this model."""
    return "forward" in vars(model) or _PATCHED in vars(model)


def drop_wrappers(model: PreTrainedModel) -> None:
    """Drop wrappers set around the forward since :func:`add_fused_head`, if that was called."""
    if isinstance(model, _TakesHeadFn):
        vars(model).pop("forward", None)


class _TakesHeadFn(ForwardOverlay):
    """The forward that :func:`add_fused_head` adds to a model."""

    def forward(self: Any, *args: Any, head_fn: HeadFn | None = None, **kwargs: Any) -> Any:
        own_forward = super().forward
        if head_fn is None:
            return vars(self).get(_PATCHED, own_forward)(*args, **kwargs)
        if kwargs.get("labels") is not None:
            raise ValueError("labels: expected None with head_fn (it has the loss), got a value")
        # wrappers pass every argument of a causal LM, as None if not given; the backbone may not
        # accept it
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        router_mask = kwargs.pop("router_mask", kwargs.get("attention_mask"))
        outputs = backbone(self)(*args, **{**kwargs, "use_cache": False})
        routers = None
        if kwargs.get("output_router_logits"):
            routers = moe_aux_loss(self, outputs, router_mask)
        head = fused_head(self)
        hidden = outputs.last_hidden_state
        if runs_in_fp32(self):
            with torch.autocast(hidden.device.type, enabled=False):
                result = head(hidden, lambda x, head: head_fn(x.to(head.weight.dtype), head))
        else:
            result = head(hidden, head_fn)
        return _output_class()(aux_loss=routers, head=result)


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return the part of ``model`` that returns the last hidden states.

    Raises:
        ValueError: the model has no separate head.
    """
    if model.base_model is not model:
        return model.base_model
    part = getattr(model, "model", None)  # Llama 4's text model: its prefix names another part
    if not isinstance(part, nn.Module):
        raise ValueError(f"model: expected a model with a head, got {type(model).__name__}")
    return part


@functools.cache
def _output_class() -> type:
    from transformers.utils import ModelOutput  # imported on use

    # `head` must not come first: ModelOutput reads a dict there as the fields themselves
    results = [("aux_loss", Any, None), ("head", Any, None)]
    return make_dataclass("FusedHeadOutput", results, bases=(ModelOutput,))


def fused_head(model: PreTrainedModel, anew: bool = False) -> nn.Module:
    """Return the head to call, or FSDP1's wrapper of it.

    Turns the layer into a FusedHead with the config's settings if it is not one already (wrappers
    may have replaced it), or if forced by the second argument.
    """
    config = model.config.get_text_config()
    layer = model.get_output_embeddings()
    inner = getattr(layer, "_fsdp_wrapped_module", layer)
    if anew or not isinstance(inner, FusedHead):
        FusedHead(
            inner,
            logit_scale=logit_scale(config),
            softcap=softcap(config),
            vocab_size=getattr(config, "unpadded_vocab_size", None),  # Inkling's logits end there
        )
    return layer


def logit_scale(config: PretrainedConfig) -> float:
    """Return the factor on the logits, 1.0 if the family has none."""
    for name, multiplies in _OTHER_SCALES.get(config.model_type, _SCALES).items():
        if (value := getattr(config, name, None)) is not None:
            return float(value) if multiplies else 1.0 / float(value)
    return 1.0


def softcap(config: PretrainedConfig) -> float | None:
    """Return the softcap of the logits, None if the family has none."""
    values = (getattr(config, name, None) for name in _SOFTCAPS)
    return next((float(value) for value in values if value is not None), None)


def keep_head_in_fp32(model: PreTrainedModel) -> None:
    """Make the head's weight fp32, and pass fp32 hidden states to ``head_fn``, without autocast.

    Raises:
        ValueError: the weight has lower precision and is shared with the embeddings, so casting it
            would change their output.
    """
    layer = model.get_output_embeddings()
    if layer.weight.dtype != torch.float32:
        if not set(layer.parameters()).isdisjoint(model.get_input_embeddings().parameters()):
            raise ValueError(
                "cast_lm_head_to_fp32: expected fp32 weights, or a head that is not tied to the "
                f"embeddings, got a tied head in {layer.weight.dtype}"
            )
        layer.float()
    layer.register_forward_pre_hook(_fp32_input)
    layer._grpo_fp32_head = True


def runs_in_fp32(model: PreTrainedModel) -> bool:
    """Return whether autocast must not round the head's inputs: after :func:`keep_head_in_fp32`."""
    wrapper = model.get_output_embeddings()
    layer = layer_in_use(wrapper)
    marked = (wrapper, layer, getattr(layer, "base_layer", None))  # an adapter may be newer
    return any(getattr(one, "_grpo_fp32_head", False) for one in marked)


def _fp32_input(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0].float(), *args[1:])


def has_moe_aux_loss(model: PreTrainedModel) -> bool:
    """Return whether the family of ``model`` has a load-balancing loss for its experts."""
    config = model.config.get_text_config()
    return hasattr(config, "output_router_logits") and _balancing_loss(model) is not None


def moe_aux_loss(model: PreTrainedModel, outputs: Any, attention_mask: Tensor | None) -> Tensor:
    """Return the load-balancing loss, (), of ``outputs`` of the backbone.

    They must come from a forward with ``output_router_logits=True``.
    """
    config = model.config.get_text_config()
    experts = getattr(model, "num_experts", None) or config.num_experts
    experts_per_token = config.num_experts_per_tok
    return _balancing_loss(model)(outputs.router_logits, experts, experts_per_token, attention_mask)


def _balancing_loss(model: PreTrainedModel) -> Any:
    """Return ``load_balancing_loss_func`` of the family's modeling file, or None."""
    name = "load_balancing_loss_func"
    # FSDP2 makes a subclass in another module
    losses = (getattr(sys.modules[kind.__module__], name, None) for kind in type(model).__mro__)
    return next((loss for loss in losses if loss is not None), None)


def check_fused_head(model: PreTrainedModel, wrapper: nn.Module | None = None) -> None:
    """Check that the fused head of ``model`` gives the model's own logits.

    Runs two forwards over a few tokens: one with ``head_fn``, and the model's own. In both, the
    last hidden states are scaled up until the logits are large. This exposes an unknown scale,
    bound, bias or step between backbone and head, whatever the weights are.

    Args:
        model: a model after :func:`add_fused_head`.
        wrapper: the module to call for a sharded model: PEFT's, FSDP's or DeepSpeed's wrapper.

    Raises:
        ValueError: the logits differ.
    """
    config = model.config.get_text_config()
    bos, eos, padding = (getattr(config, f"{x}_token_id", None) for x in ("bos", "eos", "pad"))
    # a token of text: the embedding of the padding token may be zero
    token = next(x for x in (bos, eos, 1, 0) if isinstance(x, int) and x != padding)
    device = next(model.get_input_embeddings().parameters()).device
    ids = torch.full((1, _TOKENS), token, device=device)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    runs = model if wrapper is None else wrapper
    seen: dict[str, Any] = {}  # set inside head_fn, before hooks on the head can change the result

    def note(hidden: Tensor, head: Head) -> Tensor:
        largest = _scaled_logits(hidden, head).abs().max()
        bound = head.transform.softcap
        seen["factor"] = float(torch.exp2((_LARGE / largest.clamp(min=1e-6)).log2().round()))
        for name, factor in (("fused", 1.0), ("enlarged", seen["factor"])):
            logits = _scaled_logits(hidden * factor, head)
            seen[name] = logits if bound is None else bound * torch.tanh(logits / bound)
        return seen["enlarged"]

    def enlarge(module: nn.Module, args: Any, output: Any) -> Any:
        seen["fused"] = seen["enlarged"]  # only here: some forwards do not call the backbone
        output.last_hidden_state = output.last_hidden_state * seen["factor"]
        return output

    was_training = model.training
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(), ExitStack() as undo:
        undo.callback(model.train, was_training)
        runs(**batch, head_fn=note)
        undo.callback(backbone(model).register_forward_hook(enlarge).remove)
        own = runs(**batch, use_cache=False).logits
    fused = seen["fused"]
    difference = f"shape {tuple(own.shape)} instead of {tuple(fused.shape)}"
    if own.shape == fused.shape:
        error = (own.to(fused) - fused).abs().max() / fused.abs().max()
        if error <= TOLERANCE[own.dtype]:
            return
        difference = f"a relative error of {float(error):.1e}"
    raise ValueError(
        f"model: expected the logits softcap * tanh(scale * (W h + b) / softcap) of the last "
        f"hidden states h, with scale and softcap from its config, got {difference} from "
        f"{type(model).__name__}: its head is not supported"
    )


def _scaled_logits(hidden: Tensor, head: Head) -> Tensor:
    """Return logits in fp32, without softcap."""
    rows = hidden.flatten(0, -2).float()
    logits = project(rows, head.to(rows.dtype), rows.new_empty(len(rows), head.vocab_size))
    return logits.view(*hidden.shape[:-1], -1) * head.transform.logit_scale
