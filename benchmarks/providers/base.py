"""Provider: one implementation of the works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.problem import Problem, Result
from benchmarks.shapes import Case
from grpo_kernels.tools import installed_version


@dataclass(frozen=True, kw_only=True)
class Provider:
    """A function to run, and what it lacks. Each reason is None where there is none."""

    name: str
    note: str  # what exactly is run
    run: Callable[[Problem], Result]  # the work of the problem's case
    unable: Callable[[Case], str | None] = lambda case: None  # why it has no such work
    missing: Callable[[str], str | None] = lambda device: None  # what it lacks on "cpu" or "cuda"
    redundant: Callable[[Problem], str | None] = lambda problem: None  # why it repeats another
    info: Callable[[Problem], dict[str, Any]] = lambda problem: {}  # what a row says beside times
    # the problem whose outputs are compared, and their exact values; None: its own
    exact: Callable[[Problem], tuple[Problem, Result]] | None = None
    tolerance: float = 0.0  # the relative error that its caller allows
    package: str | None = None  # the distribution that has to be installed
    checked: bool = True  # False: only GEMMs, there is no result to compare
    slow_start: bool = False  # compiles for long: left out where a suite is short of time
    timeout: float | None = None  # seconds; runs in a process of its own, and is killed after them

    @property
    def is_ours(self) -> bool:
        return is_ours(self.name)

    def absent(self, device: str) -> str | None:
        """Return why it cannot run here, or None."""
        if self.package is not None and installed_version(self.package) is None:
            return f"{self.package} is not installed"
        return self.missing(device)


def is_ours(name: str) -> bool:
    return name.startswith("ours")


def needs_gpu(device: str) -> str | None:
    """Return a ``missing`` for providers that need a GPU."""
    return None if device == "cuda" else "needs a GPU"


def with_gradients(problem: Problem, root: Tensor, upstream: Tensor | None = None, **values):
    """Return the result with the gradients of ``root`` for the problem's leaves."""
    leaves = {"dhidden": problem.hidden, "dweight": problem.weight}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(root, tuple(wanted.values()), upstream)
    detached = {name: value.detach() for name, value in values.items()}
    return Result(**detached, **dict(zip(wanted, gradients, strict=True)))
