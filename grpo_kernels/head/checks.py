"""Checks of a head's arguments, shared by every public function that takes them."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.base import Transform, stats_dtype
from grpo_kernels.head.head import PRECISIONS, Head
from grpo_kernels.head.lora import HeadLoRA
from grpo_kernels.head.precision import tf32_unavailable

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast would use for a linear layer here, None when it is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def prepare_head(
    hidden: Tensor,  # (..., D)
    weight: Tensor,
    bias: Tensor | None,
    transform: Transform,
    precision: str,
    lora: HeadLoRA | None = None,
) -> tuple[Tensor, Head]:
    """Checks the arguments and applies autocast: (..., D) hidden states, and the head.

    Raises:
        ValueError: a shape, dtype, device or value is wrong; the message names the argument.
    """
    check_floating("hidden", hidden)
    check_floating("weight", weight)
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(f"weight: expected shape (V, D), V, D >= 1, got {tuple(weight.shape)}")
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden: expected shape (..., {weight.shape[1]}) to match weight "
            f"{tuple(weight.shape)}, got {tuple(hidden.shape)}"
        )
    check_device("weight", weight, hidden)
    cast = autocast_dtype(hidden.device)
    if cast is not None and hidden.dtype != torch.float64:
        hidden = hidden.to(cast)
    elif hidden.dtype != weight.dtype:
        raise ValueError(
            f"weight: expected dtype {hidden.dtype} (of hidden) outside autocast, "
            f"got {weight.dtype}"
        )
    if bias is not None:
        check_floating("bias", bias)
        check_device("bias", bias, hidden)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: expected shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    check_precision(precision, hidden)
    _check_transform(transform)
    if lora is not None:
        _check_lora(lora, weight)
    return hidden, Head(weight, bias, transform, lora)


def _check_lora(lora: HeadLoRA, weight: Tensor) -> None:
    if not isinstance(lora, HeadLoRA):
        raise ValueError(f"lora: expected a HeadLoRA or None, got {type(lora).__name__}")
    columns, depth = weight.shape
    for name, factor in (("lora.a", lora.a), ("lora.b", lora.b)):
        check_floating(name, factor)
        check_device(name, factor, weight)
    if lora.a.dim() != 2 or lora.a.shape[1] != depth or not lora.a.shape[0]:
        raise ValueError(f"lora.a: expected shape (r, {depth}), r > 0, got {tuple(lora.a.shape)}")
    if lora.b.shape != (columns, lora.rank):
        raise ValueError(
            f"lora.b: expected shape ({columns}, {lora.rank}) (V of weight, r of lora.a), "
            f"got {tuple(lora.b.shape)}"
        )
    if not isinstance(lora.scaling, float | int) or not math.isfinite(lora.scaling):
        raise ValueError(f"lora.scaling: expected a finite number, got {lora.scaling!r}")


def check_floating(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.dtype not in _DTYPES:
        known = ", ".join(str(dtype) for dtype in _DTYPES)
        raise ValueError(f"{name}: expected one of {known}; got {value.dtype}")


def check_device(name: str, value: Tensor, hidden: Tensor) -> None:
    if value.device != hidden.device:
        raise ValueError(f"{name}: expected device {hidden.device} (of hidden), got {value.device}")


def check_precision(precision: str, hidden: Tensor) -> None:
    """Raises ValueError for an unknown precision, or one these tensors cannot be multiplied in."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}; got {precision!r}")
    why_not = tf32_unavailable(hidden.device, hidden.dtype) if precision == "tf32" else None
    if why_not is not None:
        raise ValueError(f"precision: {why_not}")


def check_workspace(size: int | None) -> None:
    """Raise ValueError unless ``max_workspace_bytes`` is a number of bytes or None."""
    if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
        raise ValueError(f"max_workspace_bytes: expected an int or None, got {size!r}")


def check_mask_range(max_id: int, columns: int) -> None:
    """Raises ValueError for a kept id outside of the vocabulary."""
    if max_id >= columns:
        raise ValueError(f"sampling_mask: expected ids in [0, {columns}), got {max_id}")


def check_target_range(low: int, high: int, columns: int) -> None:
    """Raises ValueError for target ids outside of the vocabulary."""
    if low < 0 or high >= columns:
        raise ValueError(
            f"target: expected ids in [0, {columns}) (or -100 for no loss), "
            f"got {low if low < 0 else high}"
        )


def row_temperature(
    temperature: float | Tensor, shape: torch.Size, hidden: Tensor
) -> float | Tensor:
    """A float, or the flattened per-row temperatures in the statistics dtype."""
    if not isinstance(temperature, Tensor):
        return float(temperature) if isinstance(temperature, Real) else temperature
    if temperature.requires_grad:
        raise ValueError("temperature: expected a tensor that needs no gradient")
    if temperature.dim() == 0:
        temperature = temperature.expand(shape)
    if temperature.shape != shape:
        raise ValueError(
            f"temperature: expected a float or shape {tuple(shape)} (of target), "
            f"got {tuple(temperature.shape)}"
        )
    check_device("temperature", temperature, hidden)
    return temperature.reshape(-1).to(stats_dtype(hidden.dtype))


def check_row_temperature(temperature: Tensor | None) -> None:
    """Raises ValueError for temperatures that are not positive; a GPU's are not looked at."""
    if temperature is None or temperature.device.type != "cpu":
        return
    if not bool((temperature > 0).all()):
        raise ValueError("temperature: expected values > 0")


def _check_transform(transform: Transform) -> None:
    def check(name: str, value: Any, expected: str = "a finite number > 0") -> None:
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ValueError(f"{name}: expected {expected}, got {value!r}")

    if not isinstance(transform.temperature, Tensor):
        check("temperature", transform.temperature)
    if transform.softcap is not None:
        check("softcap", transform.softcap, "a finite number > 0, or None")
    check("logit_scale", transform.logit_scale)
