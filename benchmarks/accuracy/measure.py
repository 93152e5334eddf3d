"""Log-probabilities and entropies of every provider, less those in fp64."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.accuracy.policy import make_policy
from benchmarks.accuracy.providers import PROVIDERS
from benchmarks.check import reference, reference_dtype
from benchmarks.child import accuracy_alone
from benchmarks.measure import device_is_lost, free
from benchmarks.problem import Problem, Result, assemble
from benchmarks.providers.base import Provider
from benchmarks.row import AccuracyRow, describe
from benchmarks.shapes import Case
from benchmarks.work import WORKS

_WRONG = 0.5  # nats: rounding a logit to 16 bits changes it by less
_EXACT_DIGITS, _ERROR_DIGITS = 6, 3  # of a stored number


def measure_accuracy(
    case: Case,
    device: str,
    slow: bool = True,
    deadline: float = float("inf"),
    providers: Iterable[Provider] = tuple(PROVIDERS.values()),
) -> dict[str, Any]:
    """An entry of the result file's ``accuracy`` list, as plain data.

    Args:
        case: a head, a number of tokens and a dtype; the work asks for log-probabilities and
            entropy. Who has no entropy is asked for log-probabilities alone.
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
            vars(row).update(accuracy_alone(case, provider, deadline - time.monotonic()))
        elif row.runs:
            _compare(row, provider, problem, exact)
        free(device)
    return _entry(case, exact, rows)


def measure_one(case: Case, provider: Provider, device: str) -> AccuracyRow:
    """A provider by itself; for a process that is killed when it hangs."""
    problem, row = make_problem(case, device), _row(provider, case, device)
    if row.runs:
        _compare(row, provider, problem, reference(problem))
    return row


def make_problem(case: Case, device: str) -> Problem:
    """A policy's distributions as the batch of ``case``."""
    assert reference_dtype(case, device) == torch.float64, "too large to be compared with fp64"
    return assemble(case, make_policy(case, device))


def _row(provider: Provider, case: Case, device: str) -> AccuracyRow:
    """Before any measurement."""
    unable = "it forms no log-probabilities" if not provider.checked else None
    return AccuracyRow(
        provider.name,
        provider.note,
        absent=provider.absent(device),
        unable=unable or provider.unable(_able(provider, case)),
    )


def _able(provider: Provider, case: Case) -> Case:
    """The case, without the entropy where the provider has none."""
    if provider.unable(case) is None:
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
    able = _able(provider, problem.case)
    try:
        result = provider.run(replace(problem, case=able))
        row.logprobs = _difference(result.logprobs, exact.logprobs)
        row.entropy = _difference(result.entropy, exact.entropy) if able.work.entropy else []
    except Exception as error:  # another library's failure is a result to report
        row.failure = describe(error)
        return
    # written so that NaN is wrong
    wrong = [x for x in map(abs, row.logprobs + row.entropy) if not x <= _WRONG]
    if wrong:
        row.failure = f"{len(wrong)} values are off, one by {wrong[0]:.1e}; allowed {_WRONG:g}"
        row.logprobs, row.entropy = [], []


def _difference(actual: Tensor | None, exact: Tensor | None) -> list[float]:
    """By token; not a number where either is none."""
    assert actual is not None and exact is not None, "a result is missing"
    if actual.shape != exact.shape:
        raise ValueError(f"expected the shape {tuple(exact.shape)}, got {tuple(actual.shape)}")
    return _numbers(actual.double() - exact, _ERROR_DIGITS)


def _numbers(x: Tensor, digits: int) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in x.flatten().tolist()]


def _entry(case: Case, exact: Result, rows: list[AccuracyRow]) -> dict[str, Any]:
    assert exact.logprobs is not None and exact.entropy is not None
    return {
        "model": case.model.name,
        "tokens": case.tokens,
        "hidden": case.model.hidden,
        "vocabulary": case.model.vocabulary,
        "softcap": case.model.softcap,
        "dtype": case.dtype,
        "reference": "float64",
        "logprobs": _numbers(exact.logprobs, _EXACT_DIGITS),
        "entropy": _numbers(exact.entropy, _EXACT_DIGITS),
        "rows": [asdict(row) for row in rows],
    }
