"""Products as exact as asked for, whatever torch's global switches say.

``torch.set_float32_matmul_precision`` and its kin let a library multiply fp32 matrices in tf32 or
bf16, and 16-bit ones with 16-bit partial sums. They belong to the user's model; the head's products
set their own for as long as they run. Only torch's per-backend switches are touched, since products
read these alone, and the older ``allow_tf32`` raises when both kinds are set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

# 16-bit partial sums, and fp16 accumulators: both round before the result
_REDUCED = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def tf32_unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why ``precision="tf32"`` cannot be had for these tensors, None if it can."""
    expected = "'tf32' expects fp32 tensors on a CUDA device of capability 8.0 or later"
    if dtype != torch.float32:
        return f"{expected}, got {dtype}"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{expected}, got {device} ({'ROCm' if torch.version.hip else 'no CUDA'})"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{expected}, got {major}.{minor}" if major < 8 else None


@contextmanager
def products(device: torch.device, precision: str) -> Iterator[None]:
    """Within it, products on ``device`` follow ``precision``; torch's switches are restored."""
    with ExitStack() as switches:
        if device.type == "cuda":
            matmul: Any = torch.backends.cuda.matmul
            wanted = "tf32" if precision == "tf32" else "ieee"
            switches.enter_context(_fp32_precision(matmul, wanted))
            for name in _REDUCED:
                switches.enter_context(_off(matmul, name))
        else:
            matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
            switches.enter_context(_fp32_precision(matmul, "ieee"))
        yield


@contextmanager
def _fp32_precision(backend: Any, wanted: str) -> Iterator[None]:
    before = backend.fp32_precision
    if before == wanted or (before, wanted) == ("none", "ieee"):
        yield
        return
    backend.fp32_precision = wanted
    try:
        yield
    finally:
        backend.fp32_precision = "none"  # inherits from torch.backends.fp32_precision ...
        if backend.fp32_precision != before:  # ... which is not where the value came from
            backend.fp32_precision = before


@contextmanager
def _off(backend: Any, name: str) -> Iterator[None]:
    if not getattr(backend, name):
        yield
        return
    setattr(backend, name, False)
    try:
        yield
    finally:
        setattr(backend, name, True)
