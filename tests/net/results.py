"""What a run gives, of the product or of the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE = 1.5  # what a loss is multiplied with before its backward
DIFFERENTIABLE = ("logprobs", "entropy", "masked_logprobs")


@dataclass(frozen=True)
class Found:
    """What a run gave: values, metrics and gradients by name."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def all(self) -> dict[str, Tensor]:
        """Return everything by name, gradients as "dhidden"."""
        return self.values | {f"d{name}": x for name, x in self.gradients.items()}


def objective_of(values: dict[str, Tensor]) -> Tensor:
    """Return a sum of outputs, each row with another weight."""
    total = torch.zeros((), dtype=torch.float64, device=next(iter(values.values())).device)
    for place, name in enumerate(DIFFERENTIABLE):
        if name in values:
            steps = torch.arange(len(values[name]), dtype=torch.float64, device=total.device)
            total = total + (values[name] * torch.cos(steps + 2 * place)).sum()
    return total


def bits(x: Tensor) -> Tensor:
    """Return what compares the bits of floats, NaN included."""
    if not x.is_floating_point():
        return x
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return x.contiguous().view(integers)


def assert_same_bits(got: Found, other: Found) -> None:
    first, second = got.all(), other.all()
    assert first.keys() == second.keys()
    for name, x in first.items():
        assert torch.equal(bits(x), bits(second[name])), f"{name}: other bits"
