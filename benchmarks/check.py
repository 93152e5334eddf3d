"""Correctness before speed: a provider's loss and gradients against a reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.problem import CONFIG, Problem, Result, detached
from benchmarks.providers.base import Provider
from grpo_kernels import policy_loss

_BLOCK_ROWS = 128
_FP64_PRODUCT = 1e12  # multiplications up to which the reference is fp64
# relative to the size of the tensor (Frobenius norm); the loss, of order 1, absolutely
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Check:
    """Errors of one provider, and why it failed if it did."""

    loss_error: float | None = None
    dhidden_error: float | None = None
    dweight_error: float | None = None
    logprobs_error: float | None = None
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None


def reference_dtype(problem: Problem) -> torch.dtype:
    """fp64, or fp32 where that would take longer than everything else."""
    product = problem.target.numel() * problem.weight.numel()
    return torch.float64 if product <= _FP64_PRODUCT else torch.float32


def reference_logprobs(problem: Problem) -> Tensor:
    """(B, L), a block of rows at a time."""
    exact = detached(problem, reference_dtype(problem))
    rows = zip(*(x.split(_BLOCK_ROWS) for x in _rows(exact)), strict=True)
    return torch.cat([_selected(x, exact.weight, y) for x, y in rows]).view(problem.target.shape)


def reference_loss(problem: Problem) -> Result:
    """Loss and gradients, in blocks of rows: the loss is settled by its log-probabilities."""
    exact = detached(problem, reference_dtype(problem))
    logprobs = reference_logprobs(problem).flatten().requires_grad_()
    loss, _ = policy_loss(logprobs, problem.batch(), CONFIG)
    (dlogprobs,) = torch.autograd.grad(loss, logprobs)
    hidden, target = _rows(exact)
    dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(exact.weight)
    for start in range(0, hidden.shape[0], _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        dlogits = torch.mm(hidden[block], exact.weight.t()).softmax(-1).neg_()
        dlogits.scatter_add_(-1, target[block, None], torch.ones_like(dlogits[:, :1]))
        dlogits *= dlogprobs[block, None]
        dhidden[block] = torch.mm(dlogits, exact.weight)
        dweight.addmm_(dlogits.t(), hidden[block])
    return Result(loss.detach(), dhidden.view_as(exact.hidden), dweight)


def check_loss(provider: Provider, problem: Problem, reference: Result) -> Check:
    """Runs the provider's loss once and compares it."""
    if not provider.checked:
        return Check()
    try:
        result = provider.loss(problem)
    except Exception as error:  # another library's failure is a result to report
        return Check(failure=f"{type(error).__name__}: {error}")
    errors = {
        "loss_error": (result.loss - reference.loss).abs().item(),
        "dhidden_error": relative_error(result.dhidden, reference.dhidden),
        "dweight_error": relative_error(result.dweight, reference.dweight),
    }
    return _judged(errors, problem.hidden.dtype)


def check_logprobs(provider: Provider, problem: Problem, reference: Tensor) -> Check:
    """Runs the provider's log-probabilities once and compares them."""
    assert provider.logprobs is not None
    if not provider.checked:
        return Check()
    try:
        result = provider.logprobs(problem)
    except Exception as error:  # another library's failure is a result to report
        return Check(failure=f"{type(error).__name__}: {error}")
    return _judged({"logprobs_error": relative_error(result, reference)}, problem.hidden.dtype)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of ``exact``, in blocks: no copy of a large tensor."""
    if actual.shape != exact.shape:
        return float("inf")
    difference = total = 0.0
    for a, b in zip(actual.flatten().split(1 << 22), exact.flatten().split(1 << 22), strict=True):
        difference += (a.double() - b.double()).square().sum().item()
        total += b.double().square().sum().item()
    return (difference / total) ** 0.5


def _judged(errors: dict[str, float], dtype: torch.dtype) -> Check:
    allowed = TOLERANCE[dtype]
    # written so that NaN fails
    bad = [f"{name} {value:.1e}" for name, value in errors.items() if not value <= allowed]
    failure = f"{', '.join(bad)}, allowed {allowed:.0e}" if bad else None
    return Check(**errors, failure=failure)


def _rows(problem: Problem) -> tuple[Tensor, Tensor]:
    return problem.hidden.flatten(0, 1), problem.target.flatten()


def _selected(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logps = torch.mm(hidden, weight.t()).log_softmax(-1)
    return logps.gather(-1, target[:, None]).squeeze(-1)
