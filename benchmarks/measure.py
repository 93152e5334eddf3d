"""Providers on problems: checked first, then timed in turns."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.check import TOLERANCE, compare, reference, same_bits, same_rows
from benchmarks.child import LONGEST, ChildError, ask
from benchmarks.problem import Problem, Result, make_problem
from benchmarks.providers import EVERY
from benchmarks.providers.base import Provider, is_ours
from benchmarks.results import Row
from benchmarks.shapes import MODELS, Case
from benchmarks.timing import in_turns, make_timer, measure_memory

_FEWEST_ROUNDS = 3
NOT_REACHED = "not reached: the time was up"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured."""

    device: str = "cpu"
    rounds: int = 5  # 0: no times
    budget: float = 30.0  # seconds of timing after which no further round starts
    bits: bool = True  # also whether they are the same again, and in half of the batch
    deadline: float = float("inf")  # time.monotonic() after which nothing starts
    allowed: float | None = None  # error of others than ours; None: as of ours


@dataclass(frozen=True)
class Call:
    """A provider in a case; its row is filled as it is measured."""

    provider: Provider
    case: Case
    row: Row

    @property
    def alone(self) -> bool:
        return self.provider.timeout is not None


Check = Callable[[Call, Problem, Result, Settings], None]  # against the exact result


def check_outputs(call: Call, problem: Problem, exact: Result, settings: Settings) -> None:
    """Compare outputs with the exact ones, and bits with those of a second run and of half."""
    row, provider = call.row, call.provider
    row.info |= provider.info(problem)
    result = provider.run(problem)
    if provider.checked:
        posed = problem
        if provider.exact is not None:
            posed, exact = provider.exact(problem)
        own = TOLERANCE[problem.case.dtype] + provider.tolerance
        row.errors, wrong = compare(
            result, exact, posed, own if is_ours(provider.name) else settings.allowed
        )
        row.leave_out("wrong", wrong)
        if not row.runs:
            return
        if settings.bits:
            half = problem.half()
            row.info["batch_invariant"] = same_rows(provider.run(half), result, half)
    again = None
    if problem.hidden.device.type == "cuda":
        memory, again = measure_memory(provider.run, problem)
        row.info |= memory
    elif settings.bits and provider.checked:
        again = provider.run(problem)
    if again is not None and provider.checked:
        row.info["repeatable"] = same_bits(result, again, problem)


def measure(
    calls: Sequence[tuple[Provider, Case]], settings: Settings, check: Check = check_outputs
) -> list[Row]:
    """Check every provider, measure its memory, and time those that passed, in turns.

    ``check``: what fills a row beside times and memory.
    """
    made = [Call(*call, _start_row(*call, settings)) for call in calls]
    here = [call for call in made if not call.alone]
    for call in here if settings.device == "cpu" else ():  # while this process is small
        # what compiles inside of the call would count its compiler
        if call.case.memory and call.row.runs and not call.provider.slow_start:
            try:
                call.row.info |= ask(memory_alone, call.provider.name, call.case)
            except ChildError as error:
                warnings.warn(f"no memory of {call.row.provider}: {error}", stacklevel=2)
    _measure_here(here, settings, check)
    for call in made:
        if call.alone and call.row.runs:
            _measure_alone(call, settings, check)
    return [call.row for call in made]


def _measure_here(calls: Sequence[Call], settings: Settings, check: Check) -> None:
    _check_all(calls, settings, check)
    if settings.rounds and not device_is_lost(settings.device):
        _time([call for call in calls if call.row.runs], settings)


def _measure_alone(call: Call, settings: Settings, check: Check) -> None:
    """Measure one that may hang, in a process that is killed then."""
    timeout = call.provider.timeout or LONGEST
    if settings.deadline - time.monotonic() < timeout:
        call.row.leave_out("absent", "not reached: too little time was left for it")
        return
    with attempt(call.row):
        arguments = call.provider.name, call.case, call.row, settings, check
        vars(call.row).update(vars(ask(_measure_one, *arguments, timeout=timeout)))
    call.row.info["alone"] = True


def _measure_one(name: str, case: Case, row: Row, settings: Settings, check: Check) -> Row:
    _measure_here([Call(EVERY[name], case, row)], settings, check)
    return row


def _start_row(provider: Provider, case: Case, settings: Settings) -> Row:
    """Return a row as it is before any measurement."""
    row = Row(provider.name, provider.note)
    row.leave_out("absent", provider.absent(settings.device))
    row.leave_out("unable", provider.unable(case))
    if not case.slow and (provider.slow_start or provider.timeout):
        row.leave_out("absent", "starts slowly: not in this case")
    return row


def _check_all(calls: Sequence[Call], settings: Settings, check: Check) -> None:
    """Check all; these runs are also the warm-up."""
    exact: dict[Any, Result] = {}
    for index, call in enumerate(calls):
        if time.monotonic() > settings.deadline:
            call.row.leave_out("absent", NOT_REACHED)
        if not call.row.runs:
            continue
        problem = make_problem(call.case, settings.device)
        # before a frozen head the exact values are a part of the others
        key = replace(call.case.work, name="", title="", frozen=False, entropy=False)
        if key not in exact:
            exact = {key: reference(problem)}
        with attempt(call.row):
            call.row.leave_out("unable", call.provider.redundant(problem))
            if call.row.runs:
                check(call, problem, exact[key], settings)
        if device_is_lost(settings.device):
            for later in calls[index + 1 :]:
                later.row.leave_out("absent", f"not reached: {call.provider.name} broke the device")
            return
        free(settings.device)


def _time(calls: Sequence[Call], settings: Settings) -> None:
    start = time.monotonic()
    problems: dict[Case, Problem] = {}
    for call in calls:
        if call.case not in problems:
            problems[call.case] = make_problem(call.case, settings.device)
    runs = [(call.row, partial(call.provider.run, problems[call.case])) for call in calls]

    def enough(index: int) -> bool:
        return index >= _FEWEST_ROUNDS and time.monotonic() - start > settings.budget

    time_in_turns(runs, settings.device, settings.rounds, settings.deadline, enough)


def time_in_turns(
    runs: Sequence[tuple[Row, Callable[[], Any]]],
    device: str,
    rounds: int,
    deadline: float = float("inf"),
    enough: Callable[[int], bool] = lambda index: False,
) -> None:
    """Time those that passed, as :func:`benchmarks.timing.in_turns` gives them."""
    timer = make_timer(device)
    right = [(row, run) for row, run in runs if row.runs]
    for row, run in in_turns(right, rounds, deadline, enough):
        row.seconds.append(timer(run))


def memory_alone(name: str, case: Case) -> dict[str, int]:
    """Return the bytes of one call, in a process that does nothing else."""
    provider = EVERY[name]
    tiny = replace(case, model=MODELS["tiny"], tokens=32)
    provider.run(make_problem(tiny))  # libraries are loaded, threads started
    return measure_memory(provider.run, make_problem(case, exact=False))[0]


def measure_apart(
    rows: Sequence[Row],
    times: Callable[..., list[Row]],
    growth: Callable[..., int],
    arguments: Sequence[Any],
    rounds: int,
    memory: Sequence[str],
) -> list[Row]:
    """Time everybody in one process, in turns; then find the memory of some in one of their own.

    ``times`` is called with the arguments and the rounds, ``growth`` with the arguments and a name.
    """
    running = [row for row in rows if row.runs]
    try:
        found = {x.provider: x for x in ask(times, *arguments, rounds)} if running else {}
    except ChildError as error:
        for row in running:
            row.leave_out("wrong", str(error))
        return list(rows)
    for row in running:
        vars(row).update(vars(found[row.provider]))
        if row.runs and row.provider in memory:
            with suppress(ChildError):  # which was printed
                row.info["grown_bytes"] = ask(growth, *arguments, row.provider)
    return list(rows)


@contextmanager
def attempt(row: Row) -> Iterator[None]:
    """Make an error the row's result: another library's failure is one to report."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ChildError) else f"{type(error).__name__}: "
        row.leave_out("wrong", f"{kind}{error}".strip().splitlines()[0][:200])


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
