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
    packages: tuple[str, ...] = ()  # the distributions that have to be installed
    gpu: bool = False  # whether it needs one
    capability: tuple[int, int] | None = None  # of the GPU
    or_newer: bool = False  # the capability may be higher
    missing: Callable[[str], str | None] = lambda device: None  # what else, on "cpu" or "cuda"
    redundant: Callable[[Problem], str | None] = lambda problem: None  # why it repeats another
    info: Callable[[Problem], dict[str, Any]] = lambda problem: {}  # what a row says beside times
    # the problem whose outputs are compared, and their exact values; None: its own
    exact: Callable[[Problem], tuple[Problem, Result]] | None = None
    tolerance: float = 0.0  # the relative error that its caller allows
    checked: bool = True  # False: only GEMMs, there is no result to compare
    slow_start: bool = False  # compiles for long: left out where a suite is short of time
    timeout: float | None = None  # seconds; runs in a process of its own, and is killed after them

    def absent(self, device: str) -> str | None:
        """Return why it cannot run here, or None."""
        if (self.gpu or self.capability) and device != "cuda":
            return "needs a GPU"
        if self.capability is not None:
            found = torch.cuda.get_device_capability()
            if found != self.capability and not (self.or_newer and found > self.capability):
                wanted = f"{'.'.join(map(str, self.capability))}{' or more' * self.or_newer}"
                return f"needs a GPU of compute capability {wanted}, this is {found[0]}.{found[1]}"
        return lacking(*self.packages) or self.missing(device)


def is_ours(name: str) -> bool:
    return name.startswith("ours")


def lacking(*distributions: str) -> str | None:
    """Return which distributions are not installed, as a reason to be absent."""
    missing = [name for name in distributions if installed_version(name) is None]
    return f"needs {', '.join(missing)}" if missing else None


def with_gradients(problem: Problem, root: Tensor, upstream: Tensor | None = None, **values):
    """Return the result with the gradients of ``root`` for the problem's leaves."""
    leaves = {"dhidden": problem.hidden, "dweight": problem.weight}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(root, tuple(wanted.values()), upstream)
    detached = {name: value.detach() for name, value in values.items()}
    return Result(**detached, **dict(zip(wanted, gradients, strict=True)))
