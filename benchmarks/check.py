"""Correctness before speed: a provider's results against a reference in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.problem import Problem, Result, detached
from benchmarks.shapes import Case
from grpo_kernels import policy_loss

_BLOCK_ROWS = 128
_FP64_PRODUCT = {"cpu": 1e12, "cuda": 1e15}  # multiplications up to which the reference is fp64
# Relative to the size of the tensor (Frobenius norm); the loss, of order 1, absolutely. 16-bit
# logits of a peaked policy carry an error of 2 % each: peers may round them and pass.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


@dataclass(frozen=True)
class Check:
    """Errors of one provider by output, and why it failed if it did."""

    errors: dict[str, float] = field(default_factory=dict)
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None


def reference_dtype(case: Case, device: str) -> torch.dtype:
    """fp64, or fp32 where that would take longer than everything else."""
    product = case.tokens * case.model.vocabulary * case.model.hidden
    return torch.float64 if product <= _FP64_PRODUCT[device] else torch.float32


def reference(problem: Problem) -> Result:
    """Everything the work asks for, in blocks of rows."""
    exact = detached(problem, reference_dtype(problem.case, problem.hidden.device.type))
    rows = exact.hidden.flatten(0, 1), exact.target.flatten()
    logprobs, entropy = _statistics(*rows, exact.weight, problem.softcap)
    shape = problem.target.shape
    if problem.work.kind == "forward":
        return Result(logprobs=logprobs.view(shape), entropy=entropy.view(shape))
    loss, dlogprobs = _loss(problem, logprobs.view(shape))
    dhidden, dweight = _gradients(*rows, exact.weight, problem.softcap, dlogprobs.flatten())
    return Result(
        loss=loss,
        logprobs=logprobs.view(shape),
        dhidden=dhidden.view_as(exact.hidden),
        dweight=dweight,
    )


def compare(result: Result, exact: Result, problem: Problem) -> Check:
    """Errors of the outputs that the work asks for; a NaN or a missing one fails."""
    errors = {}
    for name in problem.work.outputs:
        actual, expected = getattr(result, name), getattr(exact, name)
        if actual is None:
            return Check(errors, f"no {name}")
        if name in ("logprobs", "entropy"):
            actual, expected = actual[problem.mask], expected[problem.mask]
        absolute = name == "loss"
        errors[name] = (
            (actual - expected).abs().item() if absolute else relative_error(actual, expected)
        )
    allowed = TOLERANCE[problem.case.dtype]
    # written so that NaN fails
    bad = [f"{name} {value:.1e}" for name, value in errors.items() if not value <= allowed]
    failure = f"error of {', '.join(bad)}; allowed {allowed:.0e}" if bad else None
    return Check(errors, failure)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of ``exact``, in blocks: no copy of a large tensor."""
    if actual.shape != exact.shape:
        return float("inf")
    difference = total = 0.0
    for a, b in zip(actual.flatten().split(1 << 22), exact.flatten().split(1 << 22), strict=True):
        difference += (a.double() - b.double()).square().sum().item()
        total += b.double().square().sum().item()
    return (difference / total) ** 0.5


def same_bits(a: Result, b: Result, problem: Problem) -> bool:
    """Two results of one problem, where it asks for them."""
    return all(
        torch.equal(*(_valid(getattr(x, name), name, problem) for x in (a, b)))
        for name in problem.work.outputs
    )


def same_rows(part: Result, whole: Result, half: Problem) -> bool:
    """Whether the rows of half a batch have the bits they have in the whole batch.

    Log-probabilities without a gradient; in training the gradient of the rows, where half of a
    normaliser (a power of two) only changes exponents.
    """
    names = [name for name in half.work.outputs if name in ("logprobs", "entropy", "dhidden")]
    scale = 0.5 if half.work.kind in ("mean", "loss") else 1.0
    count = half.target.shape[0]
    for name in names:
        ours, all_rows = getattr(part, name), getattr(whole, name)[:count]
        if name == "dhidden":
            ours = ours * scale
        if not torch.equal(_valid(ours, name, half), _valid(all_rows, name, half)):
            return False
    return True


def _valid(x: Tensor, name: str, problem: Problem) -> Tensor:
    return x[problem.mask] if name in ("logprobs", "entropy") else x


def _loss(problem: Problem, logprobs: Tensor) -> tuple[Tensor | None, Tensor]:
    """The loss and its gradient with respect to the log-probabilities (B, L)."""
    kind = problem.work.kind
    if kind == "backward":
        return None, problem.dlogprobs.to(logprobs)
    logprobs = logprobs.detach().requires_grad_()
    if kind == "mean":
        loss = -logprobs.mean()
    else:
        loss, _ = policy_loss(logprobs[problem.mask], problem.batch(), problem.loss)
    (dlogprobs,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), dlogprobs


def _statistics(
    hidden: Tensor, target: Tensor, weight: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """(T,) log-probabilities and entropies."""
    logprobs, entropy = hidden.new_empty(len(hidden)), hidden.new_empty(len(hidden))
    for block in _blocks(hidden):
        logps = _scores(hidden[block], weight, softcap).log_softmax(-1)
        logprobs[block] = logps.gather(-1, target[block, None]).squeeze(-1)
        entropy[block] = -(logps.exp() * logps).sum(-1)
    return logprobs, entropy


def _gradients(
    hidden: Tensor, target: Tensor, weight: Tensor, softcap: float | None, dlogprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """(T, D) and (V, D)."""
    dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(weight)
    for block in _blocks(hidden):
        scores = _scores(hidden[block], weight, softcap)
        dlogits = scores.softmax(-1).neg_()
        dlogits.scatter_add_(-1, target[block, None], torch.ones_like(dlogits[:, :1]))
        dlogits *= dlogprobs[block, None].to(dlogits)
        if softcap is not None:
            dlogits *= 1 - (scores / softcap).square()
        dhidden[block] = torch.mm(dlogits, weight)
        dweight.addmm_(dlogits.t(), hidden[block])
    return dhidden, dweight


def _scores(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    logits = torch.mm(hidden, weight.t())
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _blocks(rows: Tensor) -> Iterator[slice]:
    return (slice(start, start + _BLOCK_ROWS) for start in range(0, len(rows), _BLOCK_ROWS))
