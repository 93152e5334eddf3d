"""Every provider on a policy's distributions against fp64: values, or a loss and its gradients."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.accuracy.policy import make_policy
from benchmarks.accuracy.providers import PROVIDERS
from benchmarks.check import compare, reference, reference_dtype
from benchmarks.child import measured_alone
from benchmarks.measure import describe, device_is_lost, free
from benchmarks.problem import Problem, Result, assemble
from benchmarks.providers.base import Provider
from benchmarks.results import AccuracyRow, AccuracyTable
from benchmarks.shapes import Case
from benchmarks.work import WORKS

# Nats, and of a gradient a part of its norm: rounding logits to 16 bits changes either by less.
_WRONG = 0.5
_EXACT_DIGITS, _ERROR_DIGITS = 6, 3  # of a stored number


def measure_accuracy(
    case: Case,
    device: str,
    slow: bool = True,
    deadline: float = float("inf"),
    providers: Sequence[Provider] = tuple(PROVIDERS.values()),
) -> AccuracyTable:
    """Compare everybody with fp64, token by token; who has no entropy, without it.

    ``slow``: also those that compile for long or need a process. Nobody is begun after
    ``deadline``, by ``time.monotonic()``.
    """
    problem = make_problem(case, device)
    exact = reference(problem)
    rows = [_row(provider, case, device) for provider in providers]
    for row, provider in zip(rows, providers, strict=True):
        if row.runs:
            row.absent = _left_out(provider, slow, deadline, device)
        if row.runs and provider.timeout is not None:
            left = deadline - time.monotonic()
            vars(row).update(measured_alone(case, provider, 0, left, "accuracy"))
        elif row.runs:
            _compare(row, provider, problem, exact)
        free(device)
    numbers = {
        "logprobs": exact.logprobs,
        "entropy": exact.entropy if problem.work.entropy else None,
        "dhidden": None if exact.dhidden is None else exact.dhidden.norm(dim=-1),
    }
    return AccuracyTable(
        **case.facts(),
        reference="float64",
        rows=rows,
        **{name: _numbers(x, _EXACT_DIGITS) for name, x in numbers.items()},
    )


def measure_one(case: Case, provider: Provider, device: str) -> AccuracyRow:
    """Compare a provider by itself; for a process that is killed when it hangs."""
    problem, row = make_problem(case, device), _row(provider, case, device)
    _compare(row, provider, problem, reference(problem))
    return row


def make_problem(case: Case, device: str) -> Problem:
    """Make a policy's distributions the batch of ``case``."""
    assert reference_dtype(case, device) == torch.float64, "too large to be compared with fp64"
    return assemble(case, make_policy(case, device))


def _row(provider: Provider, case: Case, device: str) -> AccuracyRow:
    """Return the row of a result file as it is before any measurement."""
    unable = provider.unable(_able(provider, case)) if provider.checked else "it has no results"
    return AccuracyRow(provider.name, provider.note, absent=provider.absent(device), unable=unable)


def _able(provider: Provider, case: Case) -> Case:
    """Return the case, without the entropy where the provider cannot compute it."""
    if provider.unable(case) is None or case.work.kind == "loss":
        return case
    return replace(case, work=WORKS["logprobs"])


def _left_out(provider: Provider, slow: bool, deadline: float, device: str) -> str | None:
    if device_is_lost(device):
        return "not reached: another one broke the device"
    if time.monotonic() > deadline:
        return "not reached: the time was up"
    if not slow and (provider.slow_start or provider.timeout):
        return "starts slowly: not in this case"
    return None


def _compare(row: AccuracyRow, provider: Provider, problem: Problem, exact: Result) -> None:
    posed = replace(problem, case=_able(provider, problem.case))
    row.unable = provider.redundant(posed)
    if row.unable is not None:
        return
    try:
        result = provider.run(posed)
        if posed.work.kind == "loss":
            check = compare(result, exact, posed)
            if len(check.errors) < len(posed.work.outputs):
                raise ValueError(check.failure)
            row.errors = {name: _rounded(x, _ERROR_DIGITS) for name, x in check.errors.items()}
            row.dhidden = _numbers(_difference(result, exact, "dhidden").norm(dim=-1))
        else:
            row.logprobs = _numbers(_difference(result, exact, "logprobs"))
            if posed.work.entropy:
                row.entropy = _numbers(_difference(result, exact, "entropy"))
    except Exception as error:  # another library's failure is a result to report
        row.failure = describe(error)
    # written so that NaN is wrong
    found = [*row.logprobs, *row.entropy, *row.errors.values()]
    wrong = [x for x in map(abs, found) if not x <= _WRONG]
    if wrong:
        row.failure = f"{len(wrong)} values are off, one by {wrong[0]:.1e}; allowed {_WRONG:g}"
    if row.failure:
        row.logprobs, row.entropy, row.dhidden, row.errors = [], [], [], {}


def _difference(result: Result, exact: Result, name: str) -> Tensor:
    """Return the difference of each token."""
    actual, expected = getattr(result, name), getattr(exact, name)
    assert actual is not None, f"no {name}"
    if actual.shape != expected.shape:
        raise ValueError(f"expected the shape {tuple(expected.shape)}, got {tuple(actual.shape)}")
    return actual.double() - expected


def _numbers(x: Tensor | None, digits: int = _ERROR_DIGITS) -> list[float]:
    return [] if x is None else [_rounded(value, digits) for value in x.flatten().tolist()]


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
