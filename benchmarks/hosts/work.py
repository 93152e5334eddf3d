"""What is measured of a host: a step, and the arms that take it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.problem import Result
from benchmarks.training.task import TrainingConfig

THEIRS, OURS, AT_HEAD, NO_HEAD = "theirs", "ours", "ours, loss at the head", "no head"
ARMS = (THEIRS, OURS, AT_HEAD, NO_HEAD)


@dataclass(frozen=True)
class Step:
    """A forward and backward, which leaves gradients in its leaves."""

    loss: Callable[[], Tensor]  # ()
    leaves: Sequence[Tensor]

    def __call__(self) -> None:
        self.loss().backward()

    def checked(self) -> Result:
        """Take it; return the loss, and all gradients in one vector."""
        loss = self.loss()
        loss.backward()
        gradients = [x.grad.flatten() for x in self.leaves if x.grad is not None]
        found = Result(loss.detach(), dweight=torch.cat(gradients))
        self.clear()
        return found

    def clear(self) -> None:
        """Free the gradients, which the next arm has no room for."""
        for x in self.leaves:
            x.grad = None


@dataclass(frozen=True)
class HostWork:
    """A step of a host, forward and backward."""

    host: str  # a distribution
    name: str
    arms: tuple[str, ...]
    make: Callable[[str, TrainingConfig], Step]  # of an arm

    def __str__(self) -> str:
        return f"{self.host}: {self.name}"
