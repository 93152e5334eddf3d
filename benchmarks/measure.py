"""Interleaved timing of checked providers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from benchmarks.check import compare, reference, same_bits, same_rows
from benchmarks.child import measured_alone, memory_alone
from benchmarks.problem import Problem, Result, make_problem
from benchmarks.providers.base import Provider
from benchmarks.results import Row
from benchmarks.shapes import Case
from benchmarks.timing import make_timer, measure_memory, quick_collections

_FEWEST_ROUNDS = 3
_Row = TypeVar("_Row")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured."""

    device: str = "cpu"
    rounds: int = 5
    budget: float = 30.0  # seconds of timing after which no further round starts
    memory: bool = False  # on a CPU it takes a process for each provider; on a GPU it is free
    deadline: float = float("inf")  # time.monotonic() after which nothing starts


def measure(case: Case, providers: list[Provider], settings: Settings) -> list[Row]:
    """Check every provider, measure its memory, and time those that passed.

    A round runs each once, so that a change of the machine's load meets them all.
    """
    rows = [_make_row(provider, case, settings.device) for provider in providers]
    pairs = list(zip(rows, providers, strict=True))
    if settings.memory and settings.device == "cpu":  # while this process is small
        for row, provider in pairs:
            # what compiles inside of the call would count its compiler
            if row.runs and not row.alone and not provider.slow_start:
                row.memory = memory_alone(case, provider)
    problem = make_problem(case, settings.device)
    here = [pair for pair in pairs if pair[0].runs and not pair[0].alone]
    _check_all(here, problem, settings)
    if device_is_lost(settings.device):
        return rows
    _time_all(here, problem, settings)
    del problem
    for row, provider in pairs:
        if row.runs and row.alone:
            left = settings.deadline - time.monotonic()
            vars(row).update(measured_alone(case, provider, settings.rounds, left))
    return rows


def measure_one(case: Case, provider: Provider, device: str, rounds: int) -> Row:
    """Measure a provider by itself; for a process that is killed when it hangs."""
    settings = Settings(device=device, rounds=rounds)
    row, problem = _make_row(provider, case, device), make_problem(case, device)
    _check_all([(row, provider)], problem, settings)
    _time_all([(row, provider)], problem, settings)
    return row


def _make_row(provider: Provider, case: Case, device: str) -> Row:
    return Row(
        provider.name,
        provider.note,
        absent=provider.absent(device),
        unable=provider.unable(case),
        alone=provider.timeout is not None,
    )


def _check_all(pairs: list[tuple[Row, Provider]], problem: Problem, settings: Settings) -> None:
    """Check all; these runs are also the warm-up."""
    exact = reference(problem)
    for index, (row, provider) in enumerate(pairs):
        if time.monotonic() > settings.deadline:
            row.absent = "not reached: the time was up"
            continue
        try:
            _check(row, provider, problem, exact)
        except Exception as error:  # another library's failure is a result to report
            row.failure = describe(error)
        if device_is_lost(settings.device):
            for later, _ in pairs[index + 1 :]:
                later.absent = f"not reached: {row.provider} broke the device"
            return
        free(settings.device)


def _check(row: Row, provider: Provider, problem: Problem, exact: Result) -> None:
    row.unable = provider.redundant(problem)
    if row.unable is not None:
        return
    row.schedule = provider.planned(problem)
    result = provider.run(problem)
    if provider.checked:
        check = compare(result, exact, problem)
        row.errors, row.failure = check.errors, check.failure
        if not check.passed:
            return
        half = problem.half()
        row.batch_invariant = same_rows(provider.run(half), result, half)
    if problem.hidden.device.type == "cuda":
        row.memory, again = measure_memory(provider.run, problem)
    else:
        again = provider.run(problem)
    if provider.checked:
        row.repeatable = same_bits(result, again, problem)


def _time_all(pairs: list[tuple[Row, Provider]], problem: Problem, settings: Settings) -> None:
    timer, start = make_timer(settings.device), time.monotonic()
    calls = [(row, partial(provider.run, problem)) for row, provider in pairs if row.runs]

    def enough(index: int) -> bool:
        return index >= _FEWEST_ROUNDS and time.monotonic() - start > settings.budget

    for row, call in in_turns(calls, settings.rounds, settings.deadline, enough):
        row.seconds.append(timer(call))


def in_turns(
    calls: Sequence[tuple[_Row, Any]],
    rounds: int,
    deadline: float = float("inf"),
    enough: Callable[[int], bool] = lambda index: False,
) -> Iterator[tuple[_Row, Any]]:
    """Give each once a round, every other round backwards, so that nobody always follows the same.

    No round but the first begins after ``deadline``, by ``time.monotonic()``.
    """
    for index in range(rounds):
        if enough(index) or (index > 0 and time.monotonic() > deadline):
            return
        with quick_collections():
            yield from calls if index % 2 == 0 else reversed(calls)


def describe(error: Exception) -> str:
    """Write an error in one line, as a ``failure``."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]


def device_is_lost(device: str) -> bool:
    """Return whether a kernel faulted: after that, nothing of this process runs on the GPU."""
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def free(device: str) -> None:
    """Give back what a provider or its exception left behind."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
