"""The sizes of a model: what its parameters and a token's activations depend on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_kernels.hf import EXPERTS_PER_TOKEN, TOKEN_WISE_MLPS

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A decoder layer by the numbers that it makes of a token."""

    hidden: int  # D
    queries: int  # of all heads
    inner: int  # of the MLP; of all experts that a token goes through
    norms: int  # over the hidden size
    routed: int  # experts of a token; 0: a dense MLP
    biased: bool  # experts with biases and clamped gates, as in gpt-oss
    tiled: bool  # whether ``mlp_tile_tokens`` has an effect


@dataclass(frozen=True, kw_only=True)
class Model:
    """A causal language model; parts are numbers of parameters, each counted once."""

    layers: tuple[Layer, ...]
    hidden: int  # D
    vocabulary: int  # V
    softcap: bool
    tied: bool  # embedding and head are one
    head: int
    embedding: int  # 0 if tied
    linear: int  # weights of the body's linear layers
    experts: int  # weights in stacks, which no adapter and no quantization reaches by default
    other: int  # norms, biases, embeddings of positions or images
    adapted: tuple[str, ...]  # names of layers for adapters; none: peft's ``all-linear``
    adapter_widths: int  # inputs plus outputs of these layers: an adapter of rank 1
    cached: int  # keys and values of a token in all layers
    windows: int  # 1 if layers have a window, else 0
    attention: str | None  # ``attn_implementation`` where sdpa is none, which takes masks
    images: bool  # whether it has a part for images
    quantized: str | None  # the method by which its files are quantized

    @property
    def body(self) -> int:
        return self.linear + self.experts + self.other

    @property
    def parameters(self) -> int:
        return self.body + self.embedding + self.head


def model_of(config: Any) -> Model:
    """Measure the model that a config of transformers describes. It is made without memory.

    Raises:
        ValueError: it is none that generates text by attention.
    """
    made = _without_memory(config)
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    strange = kinds - _ATTENTION
    if strange:
        raise ValueError(
            f"model: expected layers of attention ({', '.join(sorted(_ATTENTION))}), whose "
            f"activations are known; got {', '.join(sorted(strange))}"
        )
    window = getattr(text, "sliding_window", None)
    head, embedding = made.get_output_embeddings(), made.get_input_embeddings()
    tied = head.weight is embedding.weight
    own = {id(head.weight), id(embedding.weight)}
    linears = [module for _, module in _named_linears(made) if module is not head]
    of_linears = {id(module.weight) for module in linears}
    rest = {id(x): x for x in made.parameters() if id(x) not in own | of_linears}
    layers = _layers(made)
    stacks = sum(x.numel() for x in layers.parameters() if _is_stack(x))
    # peft's all-linear reaches for stacks, too, and forms their updates as a whole
    adapted = [_attention(layer) for layer in layers] if stacks else [made]
    targets = [(name, x) for part in adapted for name, x in _named_linears(part) if x is not head]
    return Model(
        layers=tuple(_layer(layer, text) for layer in layers),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        softcap=getattr(text, "final_logit_softcapping", None) is not None,
        tied=tied,
        head=head.weight.numel(),
        embedding=0 if tied else embedding.weight.numel(),
        linear=sum(module.weight.numel() for module in linears),
        experts=stacks,
        other=sum(x.numel() for x in rest.values()) - stacks,
        adapted=tuple(sorted({name for name, _ in targets})) if stacks else (),
        adapter_widths=sum(sum(module.weight.shape) for _, module in targets),
        cached=sum(_cached(layer, text) for layer in layers),
        windows=int("sliding_attention" in kinds or (not kinds and bool(window))),
        attention=None if made._supports_sdpa else _flash_attention(made),
        images=_takes_images(config),
        quantized=_quantized_by(config),
    )


def _without_memory(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if _takes_images(config) else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            made = kind.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    except ValueError as error:  # no class for it
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"model: transformers has no model that generates text: {reason}"
        ) from error
    return made


def _takes_images(config: Any) -> bool:
    return getattr(config, "vision_config", None) is not None


def _quantized_by(config: Any) -> str | None:
    described = getattr(config, "quantization_config", None)
    return described.get("quant_method", "an unnamed method") if described else None


def _layers(made: Any) -> nn.ModuleList:
    """Return the layers of the part that is for text."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for part in made.get_decoder().modules():
        layers = list(part) if isinstance(part, nn.ModuleList) else []
        if layers and isinstance(layers[0], GradientCheckpointingLayer):
            return part
    name = type(made).__name__
    raise ValueError(f"model: expected layers that can be checkpointed; got a {name} without any")


def _flash_attention(made: Any) -> str:
    """Return the attention of a model for which sdpa is none, and eager one would form scores."""
    sinks = any(name.endswith("sinks") for name, _ in made.named_parameters())
    return "kernels-community/vllm-flash-attn3" if sinks else "flash_attention_2"


def _named_linears(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what adapters on all linear layers adapt, and what 4 bits quantize, by last names."""
    from transformers.pytorch_utils import Conv1D

    for name, part in module.named_modules():
        if isinstance(part, nn.Linear | Conv1D):
            yield name.rpartition(".")[2], part


def _is_stack(parameter: nn.Parameter) -> bool:
    return parameter.dim() == 3  # (experts, inputs, outputs), or transposed


def _layer(layer: nn.Module, text: Any) -> Layer:
    hidden, routed, inner, biased = text.hidden_size, 0, 0, False
    attention = _attention(layer)
    parts = [part for part in layer.children() if part is not attention]
    for part in parts:
        into = [_inputs(x) for _, x in _named_linears(part) if _outputs(x) == hidden]
        inner += max(into, default=0)
        stacks = [x for x in part.parameters() if _is_stack(x)]
        if stacks:
            routed = next(getattr(text, name) for name in EXPERTS_PER_TOKEN if hasattr(text, name))
            biased = any("bias" in name for name, _ in part.named_parameters())
            per_expert = sum(stack[0].numel() for stack in stacks) // hidden
            inner += routed * math.ceil(per_expert / 3)  # gate, up and down
    widths = (width for _, x in _named_linears(attention) for width in _own_widths(x, hidden))
    return Layer(
        hidden=hidden,
        queries=max(widths, default=hidden),
        inner=inner,
        norms=sum("norm" in type(part).__name__.lower() for part in parts),
        routed=routed,
        biased=biased,
        tiled=type(getattr(layer, "mlp", None)).__name__ in TOKEN_WISE_MLPS,
    )


def _attention(layer: nn.Module) -> Any:
    """Return the attention of a layer, or raise ValueError if it has another mixer of tokens."""
    parts = dict(layer.named_children())
    kinds = {name: type(part).__name__.lower() for name, part in parts.items()}
    mixers = [name for name, kind in kinds.items() if re.search("attention|mamba|recurrent", kind)]
    if len(mixers) != 1 or "attention" not in kinds[mixers[0]]:
        got = ", ".join(type(parts[name]).__name__ for name in mixers) or "none"
        raise ValueError(f"model: expected one attention in each layer, got {got}")
    return parts[mixers[0]]


def _own_widths(linear: Any, hidden: int) -> list[int]:
    """Return the inputs and outputs that are no hidden states."""
    widths = [_inputs(linear), _outputs(linear)]
    return [width for width in widths if width != hidden] or widths[:1]


def _inputs(linear: Any) -> int:
    return linear.weight.shape[1 if isinstance(linear, nn.Linear) else 0]


def _outputs(linear: Any) -> int:
    return linear.weight.shape[0 if isinstance(linear, nn.Linear) else 1]


def _cached(layer: nn.Module, text: Any) -> int:
    """Return the keys and values that a layer caches of a token; a window does not count."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * heads * size
