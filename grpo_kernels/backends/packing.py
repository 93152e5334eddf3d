"""Chooses the kernel that packs rollouts on a GPU with Triton."""

from __future__ import annotations

import importlib

import torch

from grpo_kernels.backends.choice import BACKENDS, requested_backend
from grpo_kernels.batch import PACKERS, BatchInputs, Packing

_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COLUMNS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def kernel_packing(inputs: BatchInputs) -> Packing | None:
    """Pack with Triton's kernel; return None if torch operations must do it."""
    triton = BACKENDS["triton"]
    device = inputs.target.device
    chosen = requested_backend("auto") in ("auto", triton.name)
    if not (chosen and inputs.num_tokens) or torch.compiler.is_compiling():
        return None
    columns = inputs.columns.values()
    mask = inputs.mask
    if any(value.dtype not in _COLUMNS for value in columns):
        return None
    if mask is not None and mask.dtype not in (*_MASKS, *_COLUMNS):
        return None
    if triton.unsuited(device, torch.float32) or triton.unavailable():
        return None
    packing: Packing = importlib.import_module("grpo_kernels.backends.triton").KernelPacking(inputs)
    return packing


PACKERS["cuda"] = kernel_packing
