"""Which gradients of a head's inputs are wanted, and what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class MainGrad:
    """A buffer that the weight's gradient is added to, GEMM by GEMM, in place of a new tensor."""

    total: Tensor  # (V, D) fp32, or fp64 for fp64 hidden states


@dataclass(frozen=True)
class Needs:
    """Which gradients are wanted."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    lora_a: bool = False
    lora_b: bool = False
    main_grad: MainGrad | None = None  # where that of the weight is added; None: a new tensor
    wide: bool = False  # that of the weight in fp32, to be scaled before it is rounded

    @staticmethod
    def of(inputs: Sequence[Tensor | None]) -> Needs:
        """Return those of a head's inputs that autograd tracks."""
        enabled = torch.is_grad_enabled()
        wanted = [enabled and x is not None and x.requires_grad for x in inputs]
        return Needs(*wanted)  # type: ignore[arg-type]

    @property
    def of_inputs(self) -> list[bool]:
        """Which of a head's inputs get a gradient, in their order."""
        return [self.hidden, self.weight, self.bias, self.lora_a, self.lora_b]

    @property
    def any(self) -> bool:
        return any(self.of_inputs)

    @property
    def of_head(self) -> bool:
        """Whether a gradient with an entry per id of the vocabulary is wanted."""
        return self.weight or self.bias or self.lora_b

    @property
    def of_rows(self) -> Needs:
        """The others of these."""
        return replace(self, weight=False, bias=False, lora_b=False, main_grad=None)

    @property
    def of_head_alone(self) -> Needs:
        """Those that :attr:`of_rows` leaves out."""
        return replace(self, hidden=False, lora_a=False)


class Gradients(NamedTuple):
    """Gradients of the head's inputs; fp32, or the input dtype where nothing is lost by it."""

    hidden: Tensor | None = None  # (T, D)
    weight: Tensor | None = None  # (V, D)
    bias: Tensor | None = None  # (V,)
    lora_a: Tensor | None = None  # (r, D)
    lora_b: Tensor | None = None  # (V, r)

    def joined(self, others: Gradients) -> Gradients:
        """Return the sums of these and the others, where there are any."""
        pairs = zip(self, others, strict=True)
        return Gradients(*(y if x is None else x if y is None else x + y for x, y in pairs))
