"""Full logits and autograd; and the same under torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.exact import softcapped
from benchmarks.problem import Problem, Result
from benchmarks.providers.base import Provider, with_gradients
from benchmarks.shapes import Case
from grpo_kernels import policy_loss

Head = Callable[[Tensor, Tensor, Tensor, float | None, bool], tuple[Tensor, Tensor | None]]


def head(
    hidden: Tensor,  # (B, L, D)
    weight: Tensor,  # (V, D)
    target: Tensor,  # (B, L)
    softcap: float | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return (B, L) fp32 log-probabilities and entropies, as most training scripts write them."""
    logits = torch.nn.functional.linear(hidden, weight)  # (B, L, V)
    logps = softcapped(logits, softcap).log_softmax(-1, dtype=torch.float32)
    entropy = None
    if with_entropy:
        with torch.no_grad():
            entropy = -(logps.exp() * logps).sum(-1)
    return logps.gather(-1, target.unsqueeze(-1)).squeeze(-1), entropy


def run_with(call: Head, entropy_metric: bool = False) -> Callable[[Problem], Result]:
    """Run any work on top of a head that gives differentiable log-probabilities (B, L).

    ``entropy_metric``: a loss also computes the entropies, for the log.
    """

    def run(problem: Problem) -> Result:
        work = problem.work
        arguments = (problem.hidden, problem.weight, problem.target, problem.softcap)
        if work.kind == "forward":
            with torch.no_grad():
                logprobs, entropy = call(*arguments, work.entropy)
            return Result(logprobs=logprobs, entropy=entropy)
        logprobs, entropy = call(*arguments, entropy_metric and work.kind == "loss")
        return finish(problem, logprobs, entropy)

    return run


def finish(problem: Problem, logprobs: Tensor, entropy: Tensor | None = None) -> Result:
    """Compute the work's loss and its gradients from differentiable log-probabilities (B, L)."""
    kind = problem.work.kind
    if kind == "backward":
        return with_gradients(problem, logprobs, problem.dlogprobs, logprobs=logprobs)
    if kind == "mean":
        loss = -logprobs.mean()
        return with_gradients(problem, loss, loss=loss)
    rows = problem.mask.flatten().nonzero().squeeze(-1)
    kept = logprobs.flatten().index_select(0, rows)
    entropies = None if entropy is None else entropy.flatten().index_select(0, rows)
    loss, _ = policy_loss(kept, problem.batch(), problem.loss, entropies)
    return with_gradients(problem, loss, loss=loss)


def _run_compiled(problem: Problem) -> Result:
    return run_with(_compiled(problem.case))(problem)


@functools.lru_cache(maxsize=1)
def _compiled(case: Case) -> Head:
    """Compile the head anew for a case, so that no other case's graph or limit affects it."""
    torch._dynamo.reset()
    return torch.compile(head, dynamic=False)


EAGER = Provider(
    name="eager",
    note="full logits, fp32 log_softmax, autograd; no entropy in a loss",
    run=run_with(head),
)
EAGER_ENTROPY = Provider(
    name="eager-entropy",
    note="the same, and in a loss the mean entropy for the log, which ours and trl also compute",
    run=run_with(head, entropy_metric=True),
    unable=lambda case: None if case.work.kind == "loss" else "as eager",
)
COMPILE = Provider(
    name="compile",
    note="torch.compile of eager's head, its defaults, each shape by itself (dynamic=False); "
    "the loss on top is eager; no entropy in a loss",
    run=_run_compiled,
    slow_start=True,
)
