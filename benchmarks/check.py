"""Correctness before speed: a provider's results against a reference in fp64."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.problem import Problem, Result, detached, divergence, statistics
from benchmarks.shapes import Case
from grpo_kernels import policy_loss

_CHUNK_ROWS = 128  # of full logits of two models at a time
_FP64_PRODUCT = {"cpu": 1e12, "cuda": 1e15}  # multiplications up to which the reference is fp64
# Relative to the size of the tensor (Frobenius norm); the loss, of order 1, absolutely. 16-bit
# logits of a peaked policy have an error of 2 % each, and baselines may round them.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
StepResult = tuple[Tensor, Tensor]  # a trainer's loss () and gradient (N,)


def reference_dtype(case: Case, device: str) -> torch.dtype:
    """Return fp64, or fp32 if fp64 would run longer than everything else."""
    product = case.tokens * case.model.vocabulary * case.model.hidden
    return torch.float64 if product <= _FP64_PRODUCT[device] else torch.float32


def against(case: Case, device: str) -> str:
    """Name the reference of the errors."""
    return f"errors against {str(reference_dtype(case, device)).removeprefix('torch.')}"


def reference(problem: Problem) -> Result:
    """Compute all outputs of the work, in chunks of rows."""
    kind = problem.work.kind
    exact = detached(problem, reference_dtype(problem.case, problem.hidden.device.type))
    exact = replace(exact, hidden=exact.hidden.nan_to_num(0.0))  # a masked row may be anything
    leaves = [x.requires_grad_(kind != "forward") for x in (exact.hidden, exact.weight)]
    if kind == "divergence":
        loss = divergence(exact, _CHUNK_ROWS)
        dhidden, dweight = torch.autograd.grad(loss, leaves)
        return Result(loss=loss.detach(), dhidden=dhidden, dweight=dweight)
    rows = exact.hidden.flatten(0, 1), exact.target.flatten()
    found = statistics(*rows, exact.weight, problem.softcap)
    logprobs, entropy = (x.view_as(problem.target) for x in found)
    result = Result(logprobs=logprobs.detach(), entropy=entropy.detach())
    if kind == "forward":
        return result
    upstream = loss = None
    if kind == "backward":
        upstream = problem.dlogprobs.to(logprobs)
    elif kind == "mean":
        loss = -logprobs.mean()
    else:
        loss = policy_loss(logprobs[problem.mask], problem.batch(), problem.loss).loss
    gradients = torch.autograd.grad(logprobs if loss is None else loss, leaves, upstream)
    loss = None if loss is None else loss.detach()
    return replace(result, loss=loss, dhidden=gradients[0], dweight=gradients[1])


def compare(
    result: Result, exact: Result, problem: Problem, allowed: float | None = None
) -> tuple[dict[str, float], str | None]:
    """Return the errors of the work's outputs, and why they are wrong, or None.

    A NaN and a missing output are wrong. ``allowed``: the largest allowed error;
    None: :data:`TOLERANCE`.
    """
    errors: dict[str, float] = {}
    for name in problem.work.outputs:
        if getattr(result, name) is None:
            return errors, f"no {name}"
        actual, expected = (_valid(x, name, problem) for x in (result, exact))
        if name == "loss":
            errors[name] = (actual - expected).abs().item()
        else:
            errors[name] = relative_error(actual, expected)
    return errors, why_wrong(errors, problem.case.dtype, allowed)


def why_wrong(errors: dict[str, float], dtype: str, allowed: float | None = None) -> str | None:
    """Name the errors that are too large, or return None; NaN is too large."""
    allowed = TOLERANCE[dtype] if allowed is None else allowed
    bad = [f"{name} {error:.1e}" for name, error in errors.items() if not error <= allowed]
    return f"error of {', '.join(bad)}; allowed {allowed:.0e}" if bad else None


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm of ``exact``, in chunks: no large copies."""
    if actual.shape != exact.shape:
        return float("inf")
    difference = total = 0.0
    for a, b in zip(actual.flatten().split(1 << 22), exact.flatten().split(1 << 22), strict=True):
        difference += (a.double() - b.double()).square().sum().item()
        total += b.double().square().sum().item()
    return (difference / total) ** 0.5


def take_gradient(leaves: Iterable[Tensor]) -> Tensor:
    """Return the gradients of all leaves in one vector, and clear them."""
    gradients = []
    for x in leaves:
        gradients.append(torch.zeros_like(x) if x.grad is None else x.grad)
        x.grad = None
    return torch.cat([x.flatten() for x in gradients])


def compare_steps(found: StepResult, exact: StepResult) -> dict[str, float]:
    """Return the relative errors of a loss and of the gradient of all leaves together."""
    pairs = zip(("loss", "gradient"), found, exact, strict=True)
    return {name: relative_error(x, y) for name, x, y in pairs}


def same_bits(a: Result, b: Result, problem: Problem, names: Iterable[str] | None = None) -> bool:
    """Compare two results of one problem bit for bit, in the outputs of its work."""
    names = problem.work.outputs if names is None else names
    return all(torch.equal(_valid(a, x, problem), _valid(b, x, problem)) for x in names)


def same_rows(part: Result, whole: Result, half: Problem) -> bool:
    """Return whether the rows of half a batch have the same bits as in the whole batch.

    Log-probabilities without a gradient. In training the gradient of the rows: half of the
    normalizer (a power of two) changes only exponents.
    """
    names = [name for name in half.work.outputs if name in ("logprobs", "entropy", "dhidden")]
    first = Result(**{name: getattr(whole, name)[: len(half.target)] for name in names})
    if half.work.kind in ("mean", "loss") and part.dhidden is not None:
        part = replace(part, dhidden=0.5 * part.dhidden)
    return same_bits(part, first, half, names)


def _valid(result: Result, name: str, problem: Problem) -> Tensor:
    x = getattr(result, name)
    return x[problem.mask] if name in ("logprobs", "entropy") else x
