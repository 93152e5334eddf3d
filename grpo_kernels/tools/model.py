"""The sizes of a model that its parameters and activations depend on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_kernels.hf import EXPERTS_PER_TOKEN, TOKEN_WISE_MLPS

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The widths of a decoder layer."""

    hidden: int  # D
    queries: int  # of all heads together
    inner: int  # of the MLP, or of all experts of a token together
    norms: int  # number of norms over the hidden size
    routed: int  # experts per token; 0: a dense MLP
    biased: bool  # experts with biases and clamped gates, as in gpt-oss
    tiled: bool  # whether ``mlp_tile_tokens`` has an effect


@dataclass(frozen=True, kw_only=True)
class Model:
    """A causal language model; each parameter is counted in one part."""

    layers: tuple[Layer, ...]
    hidden: int  # D
    vocabulary: int  # V
    softcap: bool
    tied: bool  # embedding and head share their weight
    head: int
    embedding: int  # 0 if tied
    linear: int  # weights of the body's linear layers
    experts: int  # stacked expert weights, not adapted or quantized by default
    other: int  # norms, biases, position and image embeddings
    adapted: tuple[str, ...]  # names of layers for adapters; empty: peft's ``all-linear``
    adapter_widths: int  # inputs plus outputs of these layers: the size of an adapter of rank 1
    cached: int  # keys and values per token, over all layers
    windows: int  # 1 if layers have a window, else 0
    attention: str | None  # ``attn_implementation`` if the model does not support sdpa
    images: bool  # whether it accepts images
    quantized: str | None  # the quantization method of its files

    @property
    def body(self) -> int:
        return self.linear + self.experts + self.other

    @property
    def parameters(self) -> int:
        return self.body + self.embedding + self.head


def model_of(config: Any) -> Model:
    """Measure the model that a transformers config describes, without allocating memory for it.

    Raises:
        ValueError: it is not a model that generates text with attention layers.
    """
    made = _without_memory(config)
    text = config.get_text_config()
    has_windows = _has_windows(text)
    layers = _layers(made)
    head = made.get_output_embeddings().weight
    embedding = made.get_input_embeddings().weight
    tied = head is embedding
    linears = [x for x in _linears(made) if x.weight is not head]
    parts = {
        "head": head.numel(),
        "embedding": 0 if tied else embedding.numel(),
        "linear": sum(x.weight.numel() for x in linears),
        "experts": sum(x.numel() for x in layers.parameters() if _is_stack(x)),
    }
    adapted = linears
    if parts["experts"]:  # peft's all-linear also adapts stacks, with full-size updates
        adapted = [x for layer in layers for x in _linears(_attention(layer))]
    return Model(
        layers=tuple(_layer(layer, text) for layer in layers),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        softcap=getattr(text, "final_logit_softcapping", None) is not None,
        tied=tied,
        **parts,
        other=sum(x.numel() for x in made.parameters()) - sum(parts.values()),
        adapted=tuple(sorted({x.name for x in adapted})) if parts["experts"] else (),
        adapter_widths=sum(x.inputs + x.outputs for x in adapted),
        cached=len(layers) * _cached(text),
        windows=int(has_windows),
        attention=None if made._supports_sdpa else _flash_attention(made),
        images=_takes_images(config),
        quantized=_quantized_by(config),
    )


def _has_windows(text: Any) -> bool:
    """Return whether some layers have a window; raise ValueError for other layers."""
    kinds = set(getattr(text, "layer_types", None) or ())
    if strange := kinds - _ATTENTION:
        raise ValueError(
            f"model: expected attention layers ({', '.join(sorted(_ATTENTION))}), which have an "
            f"estimate; got {', '.join(sorted(strange))}"
        )
    if kinds:
        return "sliding_attention" in kinds
    return bool(getattr(text, "sliding_window", None))


def _without_memory(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if _takes_images(config) else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            made = kind.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    except ValueError as error:  # transformers has no class for it
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"model: expected a model that generates text; transformers: {reason}"
        ) from error
    return made


def _takes_images(config: Any) -> bool:
    return getattr(config, "vision_config", None) is not None


def _quantized_by(config: Any) -> str | None:
    described = getattr(config, "quantization_config", None)
    return described.get("quant_method", "an unnamed method") if described else None


def _layers(made: Any) -> nn.ModuleList:
    """Return the layers of the text decoder."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for part in made.get_decoder().modules():
        layers = list(part) if isinstance(part, nn.ModuleList) else []
        if layers and isinstance(layers[0], GradientCheckpointingLayer):
            return part
    name = type(made).__name__
    raise ValueError(f"model: expected layers that can be checkpointed; {name} has none")


def _flash_attention(made: Any) -> str:
    """Return the attention for a model without sdpa; eager attention would store the scores."""
    sinks = any(name.endswith("sinks") for name, _ in made.named_parameters())
    return "kernels-community/vllm-flash-attn3" if sinks else "flash_attention_2"


class _Linear(NamedTuple):
    """A linear layer: adapted by ``all-linear``, and quantized to 4 bits."""

    name: str  # the last part of its name
    weight: Tensor
    inputs: int
    outputs: int

    def own_width(self, hidden: int) -> int:
        """Return the width on the side that is not the hidden size."""
        widths = {self.inputs, self.outputs} - {hidden}
        return max(widths, default=hidden)


def _linears(module: nn.Module) -> Iterator[_Linear]:
    from transformers.pytorch_utils import Conv1D

    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            outputs, inputs = part.weight.shape
        elif isinstance(part, Conv1D):
            inputs, outputs = part.weight.shape
        else:
            continue
        yield _Linear(name.rpartition(".")[2], part.weight, inputs, outputs)


def _is_stack(parameter: nn.Parameter) -> bool:
    return parameter.dim() == 3  # (experts, inputs, outputs), or transposed


def _layer(layer: nn.Module, text: Any) -> Layer:
    hidden = text.hidden_size
    inner = 0
    routed = 0
    biased = False
    attention = _attention(layer)
    others = [part for part in layer.children() if part is not attention]
    for part in others:
        inner += max((x.inputs for x in _linears(part) if x.outputs == hidden), default=0)
        stacks = [x for x in part.parameters() if _is_stack(x)]
        if stacks:
            routed = next(getattr(text, name) for name in EXPERTS_PER_TOKEN if hasattr(text, name))
            biased = any("bias" in name for name, _ in part.named_parameters())
            per_expert = sum(stack[0].numel() for stack in stacks) // hidden
            inner += routed * math.ceil(per_expert / 3)  # gate, up and down
    return Layer(
        hidden=hidden,
        queries=max((x.own_width(hidden) for x in _linears(attention)), default=hidden),
        inner=inner,
        norms=sum("norm" in type(part).__name__.lower() for part in others),
        routed=routed,
        biased=biased,
        tiled=type(getattr(layer, "mlp", None)).__name__ in TOKEN_WISE_MLPS,
    )


def _attention(layer: nn.Module) -> nn.Module:
    """Return the attention of a layer; raise ValueError if it mixes tokens in another way."""
    kinds = [(type(part).__name__, part) for part in layer.children()]
    mixers = [x for x in kinds if re.search("attention|mamba|recurrent", x[0].lower())]
    if len(mixers) != 1 or "attention" not in mixers[0][0].lower():
        got = ", ".join(kind for kind, _ in mixers) or "none"
        raise ValueError(f"model: expected one attention in each layer, got {got}")
    return mixers[0][1]


def _cached(text: Any) -> int:
    """Return the keys and values that a layer caches per token, ignoring windows."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * heads * size
