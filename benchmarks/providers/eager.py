"""PyTorch itself: bare GEMMs, full logits with autograd, compiled, and chunked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.problem import Problem, Result, divergence, softcapped
from benchmarks.providers.base import (
    NO_ENTROPY,
    NO_SOFTCAP,
    Limit,
    Provider,
    Scores,
    run_cross_entropy,
    run_with,
)
from benchmarks.shapes import Case

_CHUNK_ROWS = {"cpu": 512, "cuda": 4096}


def _bare_gemms(problem: Problem, most_rows: int | None = None) -> Result:
    """Multiply for logits, dhidden, and dweight, with the logits in place of their gradient.

    At most ``most_rows`` at a time, by default as many as suit the device.
    """
    hidden, weight = problem.hidden.detach().flatten(0, 1), problem.weight.detach()
    if problem.work.rows != "all":  # without the tokens that can be skipped
        needed = problem.mask
        if problem.work.rows == "zero":
            needed = needed & (problem.advantages != 0)[:, None]
        hidden = hidden[needed.flatten()]
    if problem.teacher is not None:
        torch.mm(problem.teacher[0], problem.teacher[1].t())
    size = most_rows or _CHUNK_ROWS[hidden.device.type]
    tile = hidden.new_empty(min(size, hidden.shape[0]), weight.shape[0])
    dhidden = torch.empty_like(hidden) if problem.hidden.requires_grad else None
    dweight = torch.empty_like(weight) if problem.weight.requires_grad else None
    for start in range(0, hidden.shape[0], size):
        rows = hidden[start : start + size]
        logits = torch.mm(rows, weight.t(), out=tile[: rows.shape[0]])
        if dhidden is not None:
            torch.mm(logits, weight, out=dhidden[start : start + size])
        if dweight is not None:
            torch.addmm(dweight, logits.t(), rows, beta=0 if start == 0 else 1, out=dweight)
    return Result(dhidden=dhidden, dweight=dweight)


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


def _head(
    problem: Problem, with_entropy: bool, call: Callable[..., Scores] = logits_head
) -> Scores:
    return call(problem.hidden, problem.weight, problem.target, problem.softcap, with_entropy)


@lru_cache(maxsize=1)
def _compiled(case: Case) -> Callable[..., Scores]:
    """Compile the head for one case, so that no other case's graph or limit affects it."""
    torch._dynamo.reset()
    return torch.compile(logits_head, dynamic=False)


def _in_fp32(problem: Problem, with_entropy: bool) -> Scores:
    wide = replace(problem, hidden=problem.hidden.float(), weight=problem.weight.float())
    return _head(wide, with_entropy)


def _with_rounded_entropy(problem: Problem, with_entropy: bool) -> Scores:
    """Round the logits to the input dtype, and also the entropies, which are fp32."""
    logprobs, entropy = _head(problem, with_entropy)
    return logprobs, None if entropy is None else entropy.to(problem.hidden.dtype)


def _torch_lce(problem: Problem, reduction: str) -> Tensor:
    rows = _CHUNK_ROWS[problem.hidden.device.type]
    return torch.nn.functional.linear_cross_entropy(
        problem.hidden.flatten(0, 1),
        problem.weight,
        problem.target.flatten(),
        reduction=reduction,
        options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows),
    )


BARE_GEMMS = Provider(
    name="bare-gemms",
    note="only torch.mm, for the rows that matter, in chunks and in the input dtype; no loss",
    run=_bare_gemms,
    checked=False,
)
BARE_WHOLE = Provider(
    name="bare-gemms-whole",
    note="the same as bare-gemms without chunks, which shows the cost of chunks",
    run=lambda problem: _bare_gemms(problem, problem.case.tokens),
    default=False,
    checked=False,
    redundant=lambda problem: (
        "the same as bare-gemms: one chunk"
        if problem.case.tokens <= _CHUNK_ROWS[problem.hidden.device.type]
        else None
    ),
)
EAGER = (
    Provider(
        name="eager",
        note="full logits, fp32 log_softmax, and autograd; a loss has no entropy",
        run=run_with(_head, divergence=divergence),
    ),
    Provider(
        name="eager-entropy",
        note="the same as eager; a loss also has the mean entropy for the log, as in ours and trl",
        run=run_with(_head, entropy_metric=True),
        default=False,
        limits=(("the same as eager", lambda case: case.work.kind != "loss"),),
    ),
    Provider(
        name="compile",
        note="torch.compile of eager's head with defaults, for each shape (dynamic=False); the "
        "loss on top is eager and has no entropy",
        run=run_with(lambda problem, *rest: _head(problem, *rest, _compiled(problem.case))),
        slow_start=True,
    ),
    Provider(
        name="torch-lce",
        note="torch.nn.functional.linear_cross_entropy with the chunks of bare-gemms (its own "
        "chunks have few rows and are slow) and its other defaults; values of tokens are in the "
        "input dtype",
        run=run_cross_entropy(_torch_lce),
        default=False,
        limits=(NO_ENTROPY, NO_SOFTCAP),
        missing=lambda device: (
            None
            if hasattr(torch.nn, "LinearCrossEntropyOptions")
            else f"torch {torch.__version__} has no chunked linear_cross_entropy"
        ),
    ),
)
_ROUNDS: Limit = "the same as eager: nothing is rounded", lambda case: case.dtype == "fp32"
# providers whose numerics are compared, but not their time
COMPARED = (
    Provider(
        name="eager-fp32",
        note="eager after casting hidden states and head to fp32: the yardstick for our errors",
        run=run_with(_in_fp32),
        limits=(_ROUNDS,),
    ),
    Provider(
        name="verl-style",
        note="the numerics of verl's fused head, rewritten in torch: logits and entropies are "
        "rounded to the input dtype, softmax and log-probabilities are fp32",
        run=run_with(_with_rounded_entropy),
        limits=(_ROUNDS, ("the same as eager", lambda case: case.work.kind != "forward")),
    ),
)
