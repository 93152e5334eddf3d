"""Provider: one implementation of the works, and the works on top of any head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.problem import Problem, Result
from benchmarks.shapes import Case
from grpo_kernels import policy_loss
from grpo_kernels.tools import installed_version

Scores = tuple[Tensor, Tensor | None]  # (B, L) log-probabilities and, if requested, entropies
Head = Callable[[Problem, bool], Scores]  # of a problem; whether entropies are requested
Value = Callable[[Problem], Tensor]  # ()
Limit = tuple[str, Callable[[Case], Any]]  # a reason, and whether it holds for a case

NO_ENTROPY: Limit = "has no entropy", lambda case: case.work.entropy
NO_SOFTCAP: Limit = "has no softcap", lambda case: case.model.softcap is not None


@dataclass(frozen=True, kw_only=True)
class Provider:
    """A function to run, and its limits. A reason is None if there is none."""

    name: str
    note: str  # what exactly runs
    run: Callable[[Problem], Result]  # the work of the problem's case
    default: bool = True  # False: a setting or a second function of a library that has a default
    limits: tuple[Limit, ...] = ()  # works that it lacks
    packages: tuple[str, ...] = ()  # the distributions that must be installed
    gpu: bool = False  # whether it needs a GPU
    capability: tuple[int, int] | None = None  # of the GPU
    or_newer: bool = False  # the capability may be higher
    missing: Callable[[str], str | None] = lambda device: None  # what else, on "cpu" or "cuda"
    redundant: Callable[[Problem], str | None] = lambda problem: None  # why it repeats another
    info: Callable[[Problem], dict[str, Any]] = (
        lambda problem: {}
    )  # facts of a row in addition to times
    # the problem that outputs are compared on, and their exact values; None: the same problem
    exact: Callable[[Problem], tuple[Problem, Result]] | None = None
    tolerance: float = 0.0  # the relative error that its settings allow
    checked: bool = True  # False: only GEMMs, without a result to compare
    queued: bool = False  # timed while the GPU is still busy, as in a training step
    slow_start: bool = False  # compiles for long: left out if a suite is short of time
    timeout: float | None = None  # seconds; runs in its own process, and is killed after them

    def absent(self, device: str) -> str | None:
        """Return why it cannot run here, or None."""
        if (self.gpu or self.capability) and device != "cuda":
            return "needs a GPU"
        if self.capability is not None:
            found = torch.cuda.get_device_capability()
            if found != self.capability and not (self.or_newer and found > self.capability):
                needed = f"{'.'.join(map(str, self.capability))}{' or more' * self.or_newer}"
                return f"needs a GPU of compute capability {needed}, this is {found[0]}.{found[1]}"
        return lacking(*self.packages) or self.missing(device)

    def unable(self, case: Case) -> str | None:
        """Return why it lacks a work, or None."""
        return next((reason for reason, holds in self.limits if holds(case)), None)


def is_ours(name: str) -> bool:
    return name.startswith("ours")


def behind_queue(provider: Provider) -> Provider:
    """Return the same provider, timed while the CPU is ahead of the GPU."""
    return replace(
        provider,
        name=f"{provider.name}-queued",
        note=f"{provider.name} behind a queued GEMM, which hides the work of the CPU",
        queued=True,
        gpu=True,
        default=False,
    )


def lacking(*distributions: str) -> str | None:
    """Return which distributions are not installed, as a reason to be absent."""
    missing = [name for name in distributions if installed_version(name) is None]
    return f"needs {', '.join(missing)}" if missing else None


def with_gradients(problem: Problem, root: Tensor, upstream: Tensor | None = None, **values):
    """Return the result with the gradients of ``root`` for the problem's leaves."""
    leaves = {"dhidden": problem.hidden, "dweight": problem.weight}
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(root, tuple(trained.values()), upstream)
    detached = {name: value.detach() for name, value in values.items()}
    return Result(**detached, **dict(zip(trained, gradients, strict=True)))


def run_with(head: Head, entropy_metric: bool = False, **own: Value) -> Callable[[Problem], Result]:
    """Run any work on top of a head that gives differentiable log-probabilities.

    ``entropy_metric``: a loss also computes the entropies, for the log. ``own``: functions that
    give the value of a kind of work, "mean", "loss", or "divergence", instead.
    """

    def run(problem: Problem) -> Result:
        work = problem.work
        if work.kind == "forward":
            with torch.no_grad():
                logprobs, entropy = head(problem, work.entropy)
            return Result(logprobs=logprobs, entropy=entropy)
        if work.kind in own:
            loss = own[work.kind](problem)
            return with_gradients(problem, loss, loss=loss)
        logprobs, entropy = head(problem, entropy_metric and work.kind == "loss")
        if work.kind == "backward":
            return with_gradients(problem, logprobs, problem.dlogprobs, logprobs=logprobs)
        if work.kind == "mean":
            loss = -logprobs.mean()
        else:
            rows = problem.mask.flatten().nonzero().squeeze(-1)
            kept = logprobs.flatten().index_select(0, rows)
            entropies = None if entropy is None else entropy.flatten().index_select(0, rows)
            loss = policy_loss(kept, problem.batch(), problem.loss, entropies).loss
        return with_gradients(problem, loss, loss=loss)

    return run


def run_cross_entropy(
    call: Callable[[Problem, str], Tensor], **own: Value
) -> Callable[[Problem], Result]:
    """Run any work on top of a linear cross entropy that is differentiable for each token.

    It is called with "mean" or "none", and returns the () mean or the (T,) values.
    """

    def head(problem: Problem, with_entropy: bool) -> Scores:
        return -call(problem, "none").float().view_as(problem.target), None

    return run_with(head, mean=lambda problem: call(problem, "mean"), **own)
