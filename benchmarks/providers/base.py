"""What a provider is."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.problem import Problem, Result


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One implementation of the loss, and of log-probabilities where it has them."""

    name: str
    note: str  # what exactly is run
    loss: Callable[[Problem], Result]  # forward, backward, both gradients
    logprobs: Callable[[Problem], Tensor] | None = None  # (B, L), without gradient
    package: str | None = None  # the distribution that has to be installed
    checked: bool = True  # False: only products, there is no loss to compare
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def absent(self) -> str | None:
        """None when it can run, else why not."""
        if self.package is not None and self.version() is None:
            return f"{self.package} is not installed"
        return None

    def version(self) -> str | None:
        if self.package is None:
            return None
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


def with_gradients(problem: Problem, loss: Tensor) -> Result:
    """The result of a loss that hangs on the problem's leaves."""
    dhidden, dweight = torch.autograd.grad(loss, (problem.hidden, problem.weight))
    return Result(loss.detach(), dhidden, dweight)
