"""Checks of a head's arguments, shared by all public functions that accept them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from grpo_kernels.common import POSITIVE, check_device, check_number
from grpo_kernels.head.head import Head, HeadLoRA, Transform, VocabShard, stats_dtype
from grpo_kernels.head.matmul import tf32_unavailable
from grpo_kernels.head.parameters import why_not_whole

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast uses for a linear layer here; None if it is off."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else None


def head_of(
    weight: Tensor | Head,
    bias: Tensor | None,
    lora: HeadLoRA | None,
    logit_scale: float,
    softcap: float | None,
    temperature: float | Tensor,
    shard: VocabShard | None = None,
) -> Head:
    """Build the head from a call's arguments; a :class:`Head` has all except the temperature."""
    if lora is not None and not isinstance(lora, HeadLoRA):
        raise ValueError(f"lora: expected a HeadLoRA or None, got {type(lora).__name__}")
    if not isinstance(weight, Head):
        return Head(
            weight=weight,
            bias=bias,
            transform=Transform(logit_scale, softcap, temperature),
            lora=lora,
            shard=shard,
        )
    beside = {"bias": bias, "lora": lora, "softcap": softcap, "vocab_shard": shard}
    for name, value in beside.items():
        if value is not None:
            raise ValueError(f"{name}: expected None when weight is a Head, which has its own")
    if logit_scale != 1.0:
        raise ValueError(f"logit_scale: expected 1.0 when weight is a Head, got {logit_scale!r}")
    own = weight.transform.temperature
    if isinstance(own, Tensor) or own != 1.0:
        raise ValueError(
            f"weight: expected a Head with temperature 1 (pass temperature to the call), got {own}"
        )
    return replace(weight, transform=replace(weight.transform, temperature=temperature))


def checked_head(hidden: Tensor, head: Head, precision: str) -> tuple[Tensor, Head]:
    """Check a call's (..., D) hidden states and head, and apply autocast to them."""
    weight = head.weight
    check_floating("hidden", hidden)
    check_local("hidden", hidden)
    check_weight(weight)
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden: expected shape (..., {weight.shape[1]}) to match weight "
            f"{tuple(weight.shape)}, which is (V, D), got {tuple(hidden.shape)}"
        )
    check_device("weight", weight, hidden.device)
    cast = autocast_dtype(hidden.device)
    if cast is not None and hidden.dtype != torch.float64:
        hidden = hidden.to(cast)
    elif hidden.dtype != weight.dtype:
        raise ValueError(
            f"weight: expected dtype {hidden.dtype} (of hidden) outside autocast, "
            f"got {weight.dtype}"
        )
    if head.bias is not None:
        _check_part("bias", head.bias, weight, (weight.shape[0],))
    if precision == "tf32" and (why_not := tf32_unavailable(hidden.device, hidden.dtype)):
        raise ValueError(f"precision: {why_not}")
    transform = head.transform
    lora = head.lora
    shard = head.shard
    rows = weight.shape[0]
    if not isinstance(transform.temperature, Tensor):
        check_number("temperature", transform.temperature, *POSITIVE)
    if transform.softcap is not None:
        check_number("softcap", transform.softcap, f"{POSITIVE[0]}, or None", POSITIVE[1])
    check_number("logit_scale", transform.logit_scale, *POSITIVE)
    if lora is not None:
        check_floating("lora.a", lora.a)
        rank = lora.rank if lora.a.dim() else 0
        _check_part("lora.a", lora.a, weight, (max(rank, 1), weight.shape[1]))
        _check_part("lora.b", lora.b, weight, (rows, rank))
        check_number("lora.scaling", lora.scaling)
    if shard is None:
        return hidden, head
    if not isinstance(shard, VocabShard):
        raise ValueError(f"vocab_shard: expected a VocabShard, got {type(shard).__name__}")
    held = shard.rows[shard.rank]
    if rows != held:
        raise ValueError(f"weight: expected {held} rows (of vocab_shard), got {rows}")
    # drop padding
    return hidden, head if rows == shard.columns else head.columns(slice(shard.columns))


def _check_part(name: str, value: Tensor, weight: Tensor, shape: tuple[int, ...]) -> None:
    check_floating(name, value)
    check_device(name, value, weight.device, "weight")
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(value.shape)}")


def check_weight(weight: Tensor) -> None:
    """Raise ValueError unless ``weight`` is a whole (V, D) matrix of a supported dtype."""
    check_floating("weight", weight)
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(
            f"weight: expected shape (V, D), V, D >= 1, got {tuple(weight.shape)}"
            f"{why_not_whole(weight)}"
        )


def check_floating(name: str, value: Tensor) -> None:
    """Raise ValueError unless ``value`` is a tensor of a supported dtype."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.dtype not in _DTYPES:
        known = ", ".join(map(str, _DTYPES))
        raise ValueError(f"{name}: expected one of {known}; got {value.dtype}")


def check_local(name: str, value: Tensor) -> None:
    """Raise ValueError for a DTensor: each process passes its own rows or buffer."""
    if hasattr(value, "device_mesh"):
        raise ValueError(
            f"{name}: expected a plain tensor with this process's part, got a DTensor; pass "
            f"{name}.to_local()"
        )


def check_mask_range(max_id: Tensor, columns: int) -> None:
    """Raise ValueError for a sampling mask's id outside the vocabulary."""
    largest = int(max_id)
    if largest >= columns:
        raise ValueError(f"sampling_mask: expected ids in [0, {columns}), got {largest}")


def check_target_range(low: int, high: int, columns: int) -> None:
    """Raise ValueError for target ids outside the vocabulary."""
    if low < 0 or high >= columns:
        raise ValueError(
            f"target: expected ids in [0, {columns}) (or -100 for no loss), "
            f"got {low if low < 0 else high}"
        )


def row_temperature(
    temperature: float | Tensor, shape: torch.Size, hidden: Tensor
) -> float | Tensor:
    """Return a float, or the flattened per-row temperatures in the statistics dtype."""
    if not isinstance(temperature, Tensor):
        return float(temperature) if isinstance(temperature, Real) else temperature
    if temperature.requires_grad:
        raise ValueError("temperature: expected requires_grad=False")
    if temperature.dim() == 0:
        temperature = temperature.expand(shape)
    if temperature.shape != shape:
        raise ValueError(
            f"temperature: expected a float or shape {tuple(shape)} (of target), "
            f"got {tuple(temperature.shape)}"
        )
    check_device("temperature", temperature, hidden.device)
    return temperature.reshape(-1).to(stats_dtype(hidden.dtype))


_ONLY = "the kernels have only first derivatives by torch.autograd; backend='reference' has more"


def check_plain(**tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor of a ``torch.func`` transform or of forward-mode autograd."""
    if torch.compiler.is_compiling():
        # None unless a transform is active; then the assertion stops the compilation
        assert torch._C._functorch.maybe_current_level() is None
        return
    for name, x in tensors.items():
        if x is None:
            continue
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise ValueError(
                f"{name}: expected a plain tensor, got one inside a torch.func transform (grad, "
                f"vjp, jvp, vmap, ...): {_ONLY}"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise ValueError(
                f"{name}: expected a plain tensor, got one with a forward-mode tangent: {_ONLY}"
            )


def no_second_derivative(name: str) -> Callable[..., Any]:
    """Return a backward's backward, which raises RuntimeError."""

    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"{name}: second derivatives are not supported: {_ONLY}")

    return backward


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``backward(ctx, saved_tensors, *grads)`` to raise on a second derivative."""
    # torch's once_differentiable detaches the gradients from the inputs: autograd.grad then never
    # reaches its error, and silently leaves their part out of a sum

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor) -> Any:
        saved = ctx.saved_tensors  # read once: a checkpoint returns them a single time
        with torch.no_grad():
            gradients = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():  # no graph of the gradients is requested
            return gradients
        inputs = [x for x in (*saved, *grads) if isinstance(x, Tensor)]
        return _Final.apply(ctx.result_of, gradients, *inputs)

    return once


class _Final(torch.autograd.Function):
    """Gradients that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, name: str, gradients: tuple, *inputs: Tensor) -> tuple:
        ctx.result_of = name
        return gradients

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return no_second_derivative(ctx.result_of)(ctx, *grads)
