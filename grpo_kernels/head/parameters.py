"""Reads a head from a layer, plain or with PEFT adapters, and gathers sharded parameters.

Shards are DTensors (FSDP2, HSDP, TP) or DeepSpeed ZeRO-3 parameters. Neither framework notices a
weight that is only read: FSDP2 gathers and reduces when the module that owns it is called, and
ZeRO-3 empties a parameter between uses. ``DTensor.full_tensor()`` assumes that every process has
the same gradient.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.head.head import Head, HeadLoRA, Transform, VocabShard, stats_dtype

AS_A_MODULE = "call the head as a module instead: grpo_kernels.FusedHead(lm_head)"


def head_of_layer(layer: Any, transform: Transform) -> Head:
    """Return the layer's current parameters, with its active adapters joined into one."""
    layer = layer_in_use(layer)
    _unmerge_if_disabled(layer)
    updates: list[HeadLoRA] = []
    if hasattr(layer, "base_layer"):
        updates += _lora(layer)
        layer = layer.base_layer
    tokens = getattr(layer, "token_adapter", None)  # PEFT's adapter of single tokens
    _unmerge_if_disabled(tokens)
    base = layer if tokens is None else tokens.base_layer
    weight, bias = getattr(base, "weight", None), getattr(base, "bias", None)
    # a quantized weight is packed: it is not a (V, D) floating-point tensor
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise ValueError(
            f"lm_head: expected a plain linear layer, got {type(base).__name__}; if it is "
            "quantized, leave it out of the quantization"
        )
    if weight.dim() != 2 and not is_sharded(weight):
        raise ValueError(
            f"lm_head: expected a weight of shape (V, D), got {tuple(weight.shape)}"
            f"{why_not_whole(weight)}"
        )
    if tokens is not None:
        if bias is not None:
            raise ValueError(
                "lm_head: expected no bias with trainable_token_indices (PEFT drops it), got one; "
                "use modules_to_save for the head"
            )
        updates += _trained_rows(tokens, weight)
    return Head(weight, bias, transform, HeadLoRA.joined(updates))


def layer_in_use(layer: Any) -> Any:
    """Return the layer inside PEFT's wrapper for a fully trained head (``modules_to_save``)."""
    copies = getattr(layer, "modules_to_save", None)
    if copies is None:
        return layer
    active = [] if layer.disable_adapters else layer.active_adapters
    names = [name for name in active if name in copies]
    return copies[names[0]] if names else layer.original_module


def _unmerge_if_disabled(layer: Any) -> None:
    """Unmerge adapters from a layer's weight if they are disabled, as the forward of PEFT's layers
    does."""
    if getattr(layer, "merged", False) and layer.disable_adapters:
        layer.unmerge()


def _lora(layer: Any) -> list[HeadLoRA]:
    """Return the adapters in use; none if they are merged into the weight."""
    adapters: list[HeadLoRA] = []
    if layer.merged or layer.disable_adapters:
        return adapters
    plain = hasattr(layer, "lora_A") and not hasattr(layer, "parameter_name")
    problem = None if plain else f"an adapter of type {type(layer).__name__}"
    for name in layer.active_adapters:
        if plain and name in layer.lora_A:
            a, b, scaling = layer.lora_A[name].weight, layer.lora_B[name], layer.scaling[name]
            adapters.append(HeadLoRA(a=a, b=b.weight, scaling=scaling))
            if name in getattr(layer, "lora_variant", {}) or layer.use_dora.get(name):
                problem = "DoRA or another variant of LoRA"
            elif getattr(layer.lora_dropout[name], "p", 0.0) > 0:
                problem = f"lora_dropout={layer.lora_dropout[name].p}"
            elif b.bias is not None:
                problem = "lora_bias=True"
        if problem is not None:
            raise ValueError(
                f"lm_head: expected plain LoRA without dropout, got {problem}; change it "
                "or exclude the head from target_modules"
            )
    return adapters


def _trained_rows(tokens: Any, weight: Tensor) -> list[HeadLoRA]:
    """Return trained rows R that replace rows of the weight (``trainable_token_indices``), as LoRA.

    With P (V, k), which has a 1 at the id of each row, logits are ``X W^T + X (R - P^T W)^T P^T``.
    So the weight is not copied, and only the gradient of R (k, D) is computed.
    """
    updates: list[HeadLoRA] = []
    if tokens.merged or tokens.disable_adapters:
        return updates
    if is_sharded(weight):
        raise ValueError(
            "lm_head: expected a whole weight with trainable_token_indices, got a sharded one; "
            f"{AS_A_MODULE}, or use modules_to_save if ZeRO-3 or tensor parallelism shards it"
        )
    for name in tokens.active_adapters:
        ids = tokens.token_indices[name]
        if len(set(ids)) < len(ids):
            raise ValueError(f"trainable_token_indices: expected each id once, got {ids}")
        index = torch.tensor(ids, device=weight.device)
        trained = tokens.trainable_tokens_delta[name].to(weight)  # rounded as PEFT does
        wide = stats_dtype(weight.dtype)
        a = trained.to(wide) - weight[index].to(wide)
        b = torch.zeros(len(weight), len(ids), dtype=wide, device=weight.device)
        b[index, torch.arange(len(ids), device=weight.device)] = 1.0
        updates.append(HeadLoRA(a=a, b=b))
    return updates


def unshard_head(head: Head) -> Head:
    """Return the head with whole tensors instead of sharded parameters.

    A DTensor is gathered over all mesh dimensions except the head's vocabulary shard. Its gradient
    is the mean over the gathered processes, whether they have different rows (data parallel) or the
    same (tensor parallel). The whole tensor lives as long as the graph. A ZeRO-3 parameter is
    gathered for the module that is running its forward, and again for its backward.
    """
    if _is_freed(head.weight):
        raise ValueError(
            f"weight: expected data, got a tensor with memory that FSDP has freed; {AS_A_MODULE}"
        )
    if not any(map(is_sharded, head.tensors)):
        return head
    whole: list[Any] = list(head.tensors)
    for place, name in enumerate(("weight", "bias", "lora.a", "lora.b")):
        if hasattr(whole[place], "device_mesh"):  # a DTensor
            whole[place] = _of_all_shards(whole[place], head.shard)
        elif is_sharded(whole[place]):
            whole[place] = _fetched(name, whole[place])
    return head.with_tensors(*whole)


def is_sharded(x: Any) -> bool:
    """Return whether ``x`` is a DTensor, or a parameter that ZeRO-3 manages."""
    return hasattr(x, "device_mesh") or hasattr(x, "ds_status")


def why_not_whole(x: Tensor) -> str:
    """Say why a tensor instead of a (V, D) weight may be empty or flat; else return nothing."""
    if hasattr(x, "ds_shape"):
        return f": a parameter of shape {tuple(x.ds_shape)} that ZeRO-3 has partitioned"
    if x.numel() and x.dim() != 1:
        return ""
    return f"; if ZeRO-3 or FSDP has sharded the weight, {AS_A_MODULE}"


def _is_freed(x: Any) -> bool:
    """Return whether ``x`` is a view of a tensor that FSDP gathered and has freed since."""
    if torch.compiler.is_compiling() or is_sharded(x) or not isinstance(x, Tensor):
        return False
    # tensors wrapped by functorch have no storage
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return not wrapped and x.numel() > 0 and x.untyped_storage().size() == 0


def _of_all_shards(x: Any, shard: VocabShard | None) -> Tensor:
    from torch.distributed.tensor import Partial, Replicate  # already loaded by the DTensor

    mesh = x.device_mesh
    placements = []
    of_gradient = []
    processes = 1
    for dimension, own in enumerate(x.placements):
        kept = shard is not None and mesh.get_group(dimension).group_name == shard.group
        placements.append(own if kept else Replicate())
        of_gradient.append(own if kept else Partial())
        processes *= 1 if kept else mesh.size(dimension)
    whole = x.redistribute(placements=placements).to_local(grad_placements=of_gradient)
    return DividedGradient.apply(whole, processes) if whole.requires_grad else whole


class DividedGradient(torch.autograd.Function):
    """Divide the gradient by the number of processes that it will be summed over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, processes: int) -> Tensor:
        ctx.processes = processes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.processes, None


def _fetched(name: str, parameter: Any) -> Tensor:
    """Gather a parameter as ZeRO-3 does if another module's forward reads it from its owner."""
    zero: Any = sys.modules["deepspeed.runtime.zero.partition_parameters"]
    available = parameter.ds_status == zero.ZeroParamStatus.AVAILABLE
    # the running modules, outermost first; each engine has put its module there once, permanently
    running = sys.modules["deepspeed.runtime.zero.parameter_offload"].FWD_MODULE_STACK
    if all(running.count(module) < 2 for module in running):
        if available and not torch.is_grad_enabled():
            return parameter
        raise ValueError(
            f"{name}: expected a ZeRO-3 parameter inside the DeepSpeed engine's forward, which "
            "gathers it, also for the backward, and scales and reduces its gradient; got one "
            "outside; call the head in the forward of the engine's module, with "
            "grpo_kernels.FusedHead, or grpo_kernels.hf.add_fused_head for a transformers model"
        )
    module: nn.Module = running[-1]
    if all(parameter is not own for own in module.parameters(recurse=False)):
        zero.register_external_parameter(module, parameter)
    if not available:
        parameter.all_gather()
    return parameter
