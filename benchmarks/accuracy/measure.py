"""Every provider on a policy's distributions against fp64: values, or a loss and its gradients."""

from __future__ import annotations

import time
from collections.abc import Iterable
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
    providers: Iterable[Provider] = tuple(PROVIDERS.values()),
) -> AccuracyTable:
    """Compare everybody with fp64, token by token.

    Args:
        case: a head, a number of tokens and a dtype. The work asks for log-probabilities and
            entropy, where who has no entropy is asked for log-probabilities alone, or for a loss.
        device: ``cpu`` or ``cuda``.
        slow: also those that compile for long or need a process.
        deadline: by ``time.monotonic()``; nobody is begun after it.
        providers: each gets a row, with values or with the reason for having none.
    """
    problem = make_problem(case, device)
    exact = reference(problem)
    rows: list[AccuracyRow] = []
    for provider in providers:
        row = _row(provider, case, device)
        rows.append(row)
        if row.runs:
            row.absent = _left_out(provider, slow, deadline, device)
        if row.runs and provider.timeout is not None:
            left = deadline - time.monotonic()
            vars(row).update(measured_alone(case, provider, 0, left, "accuracy"))
        elif row.runs:
            _compare(row, provider, problem, exact)
        free(device)
    return _entry(case, exact, rows)


def measure_one(case: Case, provider: Provider, device: str) -> AccuracyRow:
    """Compare a provider by itself; for a process that is killed when it hangs."""
    problem, row = make_problem(case, device), _row(provider, case, device)
    if row.runs:
        _compare(row, provider, problem, reference(problem))
    return row


def make_problem(case: Case, device: str) -> Problem:
    """Make a policy's distributions the batch of ``case``."""
    assert reference_dtype(case, device) == torch.float64, "too large to be compared with fp64"
    return assemble(case, make_policy(case, device))


def _row(provider: Provider, case: Case, device: str) -> AccuracyRow:
    """Return the row of a result file as it is before any measurement."""
    unable = "it has no results" if not provider.checked else None
    return AccuracyRow(
        provider.name,
        provider.note,
        absent=provider.absent(device),
        unable=unable or provider.unable(_able(provider, case)),
    )


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
    of_kind = _compare_gradients if posed.work.kind == "loss" else _compare_values
    try:
        of_kind(row, provider.run(posed), exact, posed)
    except Exception as error:  # another library's failure is a result to report
        row.failure = describe(error)
        return
    # written so that NaN is wrong
    found = [*row.logprobs, *row.entropy, *row.errors.values()]
    wrong = [x for x in map(abs, found) if not x <= _WRONG]
    if wrong:
        row.failure = f"{len(wrong)} values are off, one by {wrong[0]:.1e}; allowed {_WRONG:g}"
        row.logprobs, row.entropy, row.dhidden, row.errors = [], [], [], {}


def _compare_values(row: AccuracyRow, result: Result, exact: Result, problem: Problem) -> None:
    row.logprobs = _difference(result.logprobs, exact.logprobs)
    row.entropy = _difference(result.entropy, exact.entropy) if problem.work.entropy else []


def _compare_gradients(row: AccuracyRow, result: Result, exact: Result, problem: Problem) -> None:
    check = compare(result, exact, problem)
    if set(check.errors) != set(problem.work.outputs):
        raise ValueError(check.failure)
    assert result.dhidden is not None and exact.dhidden is not None
    row.errors = {name: _rounded(value, _ERROR_DIGITS) for name, value in check.errors.items()}
    row.dhidden = _numbers((result.dhidden.double() - exact.dhidden).norm(dim=-1), _ERROR_DIGITS)


def _difference(actual: Tensor | None, exact: Tensor | None) -> list[float]:
    """Return the difference of each token; NaN where either value is none."""
    assert actual is not None and exact is not None, "a result is missing"
    if actual.shape != exact.shape:
        raise ValueError(f"expected the shape {tuple(exact.shape)}, got {tuple(actual.shape)}")
    return _numbers(actual.double() - exact, _ERROR_DIGITS)


def _numbers(x: Tensor, digits: int) -> list[float]:
    return [_rounded(value, digits) for value in x.flatten().tolist()]


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _entry(case: Case, exact: Result, rows: list[AccuracyRow]) -> AccuracyTable:
    assert exact.logprobs is not None
    entropy, dhidden = exact.entropy, exact.dhidden
    return AccuracyTable(
        **case.facts(),
        reference="float64",
        logprobs=_numbers(exact.logprobs, _EXACT_DIGITS),
        entropy=[] if entropy is None else _numbers(entropy, _EXACT_DIGITS),
        dhidden=[] if dhidden is None else _numbers(dhidden.norm(dim=-1), _EXACT_DIGITS),
        rows=rows,
    )
