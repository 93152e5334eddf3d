"""Python values as tensors of bytes: a compiler passes those on and depends on none of the values.

``torch.compile`` guards on each Python number it meets, and compiles anew when one of them differs.
The lengths of a batch differ in every step.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

_STEP = 4096  # sizes are rounded up, so that they seldom change


class Opaque:
    """A frozen dataclass whose Python values are at hand as bytes."""

    packed: Tensor  # uint8, on the CPU

    def _pack(self, values: object) -> None:
        object.__setattr__(self, "packed", to_bytes(values))


def to_bytes(values: object) -> Tensor:
    """Picklable values as a uint8 CPU tensor."""
    data = pickle.dumps(values)
    return torch.frombuffer(
        bytearray(data.ljust(-(-len(data) // _STEP) * _STEP)), dtype=torch.uint8
    )


def from_bytes(packed: Tensor) -> Any:
    """What :func:`to_bytes` was given; the filling after the pickle is not read."""
    return pickle.loads(packed.numpy().tobytes())
