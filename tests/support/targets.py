"""On which backends and devices a test body runs."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import available_backends


def targets(*without: str) -> list:
    """Return (backend, device) parameters: all on this CPU, and on a GPU those that run there."""
    cpu = [
        pytest.param(name, torch.device("cpu"), id=f"{name}-cpu")
        for name in available_backends()
        if name not in ("reference", *without)
    ]
    gpu = [
        pytest.param(name, torch.device("cuda"), id=f"{name}-cuda", marks=pytest.mark.gpu)
        for name in ("triton", "chunked")
    ]
    return [*cpu, *gpu]
