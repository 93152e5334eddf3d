"""Full logits and autograd; and the same under torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.exact import softcapped
from benchmarks.problem import Problem, Result
from benchmarks.providers.base import Provider, with_gradients
from benchmarks.shapes import Case
from grpo_kernels import policy_loss

Scores = tuple[Tensor, Tensor | None]  # (B, L) log-probabilities and, where wanted, entropies
Head = Callable[[Problem, bool], Scores]  # of a problem; whether entropies are wanted


def logits_head(
    hidden: Tensor,  # (B, L, D)
    weight: Tensor,  # (V, D)
    target: Tensor,  # (B, L)
    softcap: float | None,
    with_entropy: bool,
) -> Scores:
    """Return fp32 scores, as most training scripts compute them."""
    logits = torch.nn.functional.linear(hidden, weight)  # (B, L, V)
    logps = softcapped(logits, softcap).log_softmax(-1, dtype=torch.float32)
    entropy = None
    if with_entropy:
        with torch.no_grad():
            entropy = -(logps.exp() * logps).sum(-1)
    return logps.gather(-1, target.unsqueeze(-1)).squeeze(-1), entropy


def head(problem: Problem, with_entropy: bool) -> Scores:
    return logits_head(
        problem.hidden, problem.weight, problem.target, problem.softcap, with_entropy
    )


def run_with(
    call: Head,
    entropy_metric: bool = False,
    *,
    mean: Callable[[Problem], Tensor] | None = None,
    loss: Callable[[Problem], Tensor] | None = None,
) -> Callable[[Problem], Result]:
    """Run any work on top of a head that gives differentiable log-probabilities.

    ``entropy_metric``: a loss also computes the entropies, for the log. ``mean`` and ``loss``: give
    the value of a work of that kind in its stead.
    """

    def run(problem: Problem) -> Result:
        work = problem.work
        if work.kind == "forward":
            with torch.no_grad():
                logprobs, entropy = call(problem, work.entropy)
            return Result(logprobs=logprobs, entropy=entropy)
        own = {"mean": mean, "loss": loss}.get(work.kind)
        if own is not None:
            value = own(problem)
            return with_gradients(problem, value, loss=value)
        logprobs, entropy = call(problem, entropy_metric and work.kind == "loss")
        return _finish(problem, logprobs, entropy)

    return run


def _finish(problem: Problem, logprobs: Tensor, entropy: Tensor | None) -> Result:
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


def _compiled_head(problem: Problem, with_entropy: bool) -> Scores:
    compiled = _compiled(problem.case)
    return compiled(problem.hidden, problem.weight, problem.target, problem.softcap, with_entropy)


@functools.lru_cache(maxsize=1)
def _compiled(case: Case) -> Callable[..., Scores]:
    """Compile the head anew for a case, so that no other case's graph or limit affects it."""
    torch._dynamo.reset()
    return torch.compile(logits_head, dynamic=False)


def _in_fp32(problem: Problem, with_entropy: bool) -> Scores:
    wide = replace(problem, hidden=problem.hidden.float(), weight=problem.weight.float())
    return head(wide, with_entropy)


def _rounded_twice(problem: Problem, with_entropy: bool) -> Scores:
    """Round the logits to the input dtype, and what follows them in fp32 as well."""
    dtype, (logprobs, entropy) = problem.hidden.dtype, head(problem, with_entropy)
    return logprobs.to(dtype), None if entropy is None else entropy.to(dtype)


def _sixteen_bits(case: Case) -> str | None:
    return "the same as eager: nothing is rounded" if case.dtype == "fp32" else None


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
    run=run_with(_compiled_head),
    slow_start=True,
)
# numerics that are compared but not worth timing
EAGER_FP32 = Provider(
    name="eager-fp32",
    note="eager with hidden states and head cast to fp32 first: what ours is held against",
    run=run_with(_in_fp32),
    unable=_sixteen_bits,
)
VERL_STYLE = Provider(
    name="verl-style",
    note="the numerics of verl's fused head in torch, written anew: logits rounded to the input "
    "dtype, softmax in fp32, log-probabilities and entropies rounded to the input dtype",
    run=run_with(_rounded_twice),
    unable=lambda case: (
        _sixteen_bits(case)
        or (None if case.work.kind == "forward" else "a loss takes no 16-bit log-probabilities")
    ),
)
