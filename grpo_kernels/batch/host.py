"""Values of tensors on the host: free to read on a CPU, a wait for the device elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor


def reading_is_free(x: Tensor) -> bool:
    """Whether the host can read ``x`` without waiting for a device."""
    return x.device.type == "cpu"


def fetch(x: Tensor) -> list[int]:
    """The values of integers ``x``, (N,). A training step waits for a device here, and once."""
    return x.tolist()


def require(condition: Tensor, message: str) -> None:
    """Raises ValueError unless ``condition``, (); on a device an assertion there fails later."""
    if not reading_is_free(condition):
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)
