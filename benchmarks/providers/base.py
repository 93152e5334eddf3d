"""What a provider is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.problem import Problem, Result
from benchmarks.shapes import Case
from grpo_kernels.tools import installed_version


def does_everything(case: Case) -> str | None:
    """An ``unable`` for providers without gaps."""
    return None


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One implementation of the works."""

    name: str
    note: str  # what exactly is run
    run: Callable[[Problem], Result]  # the work of the problem's case
    unable: Callable[[Case], str | None] = does_everything  # why it has no such work, or not so
    missing: Callable[[str], str | None] = lambda device: None  # what it lacks on "cpu" or "cuda"
    package: str | None = None  # the distribution that has to be installed
    checked: bool = True  # False: only products, there is no result to compare
    slow_start: bool = False  # compiles for long: left out where a suite is short of time
    timeout: float | None = None  # seconds; runs in a process of its own, and is killed after them
    planned: Callable[[Problem], str | None] = lambda problem: (
        None
    )  # which schedule of ours it takes

    def absent(self, device: str) -> str | None:
        """None when it can run here, else why not."""
        if self.package is not None and self.version() is None:
            return f"{self.package} is not installed"
        return self.missing(device)

    def version(self) -> str | None:
        if self.package is None:
            return None
        return installed_version(self.package)


def needs_gpu(device: str) -> str | None:
    """A ``missing`` for providers of GPU kernels."""
    return None if device == "cuda" else "needs a GPU"


def with_gradients(problem: Problem, root: Tensor, upstream: Tensor | None = None, **values):
    """The result whose gradients follow from ``root``, which hangs on the problem's leaves."""
    leaves = {"dhidden": problem.hidden, "dweight": problem.weight}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(root, tuple(wanted.values()), upstream)
    detached = {name: value.detach() for name, value in values.items()}
    return Result(**detached, **dict(zip(wanted, gradients, strict=True)))
