"""Providers on problems: checked first, then timed in turns."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks import text
from benchmarks.check import TOLERANCE, compare, reference, same_bits, same_rows
from benchmarks.child import ChildError, ask
from benchmarks.problem import Problem, Result, make_problem
from benchmarks.providers import EVERY
from benchmarks.providers.base import Provider, is_ours
from benchmarks.results import Row
from benchmarks.shapes import MODELS, Case
from benchmarks.timing import in_turns, make_timer, measure_memory


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured."""

    device: str = "cpu"
    rounds: int = 5  # 0: no times
    budget: float = 30.0  # seconds of timing after which no further round starts
    bits: bool = True  # also whether they are the same again, and in half of the batch
    allowed: float | None = None  # error of other libraries; None: the same as for ours


Call = tuple[Provider, Case, Row]  # a provider in a case; its row is filled as it is measured
# fills a row with all but times and memory, given the exact result
Check = Callable[[Provider, Row, Problem, Result, Settings], None]


def check_outputs(
    provider: Provider, row: Row, problem: Problem, exact: Result, settings: Settings
) -> None:
    """Compare outputs with exact ones, and bits with a second run and half of the batch."""
    row.info |= provider.info(problem)
    result = provider.run(problem)
    if provider.checked:
        posed = problem
        if provider.exact is not None:
            posed, exact = provider.exact(problem)
        own = TOLERANCE[problem.case.dtype] + provider.tolerance
        allowed = own if is_ours(provider.name) else settings.allowed
        row.errors, wrong = compare(result, exact, posed, allowed)
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


def measure(calls: Sequence[Call], settings: Settings, check: Check = check_outputs) -> None:
    """Check every provider, measure its memory, and time those that passed, in turns."""
    for provider, case, row in calls:
        row.leave_out("absent", provider.absent(settings.device))
        row.leave_out("unable", provider.unable(case))
        if not case.slow and (provider.slow_start or provider.timeout):
            row.leave_out("absent", "starts slowly: not in this case")
    here = [call for call in calls if call[0].timeout is None]
    for provider, case, row in here if settings.device == "cpu" else ():  # this process is small
        # compiling in the call would count the compiler's memory
        if case.memory and row.runs and not provider.slow_start:
            with suppress(ChildError):  # it was printed
                row.info |= ask(memory_alone, provider.name, case)
    _measure_here(here, settings, check)
    for provider, case, row in calls:
        if provider.timeout is not None and row.runs:  # it may hang, and is then killed
            with attempt(row):
                asked = provider.name, case, settings, check
                vars(row).update(vars(ask(_measure_one, *asked, timeout=provider.timeout)))
            row.info["alone"] = True


def _measure_one(name: str, case: Case, settings: Settings, check: Check) -> Row:
    row = Row(name, EVERY[name].note)
    _measure_here([(EVERY[name], case, row)], settings, check)
    return row


def _measure_here(calls: Sequence[Call], settings: Settings, check: Check) -> None:
    """Check all providers, which is also the warm-up, and time those that passed."""
    exact: dict[Any, Result] = {}
    broken = None
    for provider, case, row in calls:
        if broken is not None:
            row.leave_out("absent", f"not reached: {broken} broke the device")
        if not row.runs:
            continue
        problem = make_problem(case, settings.device)
        # the exact values of a frozen head are part of the others
        key = replace(case.work, name="", title="", frozen=False, entropy=False)
        if key not in exact:
            exact = {key: reference(problem)}
        with attempt(row):
            row.leave_out("unable", provider.redundant(problem))
            if row.runs:
                check(provider, row, problem, exact[key], settings)
        if device_is_lost(settings.device):
            broken = provider.name
        else:
            free(settings.device)
    if broken is None and settings.rounds:
        made = [call for call in calls if call[2].runs]
        ways = {provider.queued for provider, _, _ in made}
        timers = {queued: make_timer(settings.device, queued) for queued in ways}
        runs = [
            (
                row,
                (
                    timers[provider.queued],
                    partial(provider.run, make_problem(case, settings.device)),
                ),
            )
            for provider, case, row in made
        ]
        race(runs, settings.rounds, lambda pair: pair[0](pair[1]), settings.budget)


def error_cells(row: Row) -> dict[str, str]:
    """Return the cells of memory and of the errors of gradients."""
    errors = {name: text.error(row.errors.get(name)) for name in ("dhidden", "dweight")}
    return {"extra MiB": text.mib(row.extra_bytes), **errors}


def race(
    runs: Sequence[tuple[Row, Any]],
    rounds: int,
    timer: Callable[[Any], float],
    budget: float = math.inf,
) -> None:
    """Time the rows that passed, in the order of :func:`benchmarks.timing.in_turns`."""
    for row, run in in_turns([pair for pair in runs if pair[0].runs], rounds, budget):
        if row.runs:
            with attempt(row):
                row.seconds.append(timer(run))


def memory_alone(name: str, case: Case, device: str = "cpu") -> dict[str, int]:
    """Return the bytes of one call; on a CPU, in a process that does nothing else."""
    provider = EVERY[name]
    tiny = replace(case, model=MODELS["tiny"], tokens=32)
    provider.run(make_problem(tiny, device))  # libraries are loaded, threads started
    return measure_memory(provider.run, make_problem(case, device, exact=False))[0]


def add_growth(rows: Sequence[Row], growth: Callable[[str], int]) -> None:
    """Add the number of bytes by which a fresh process of each row grows."""
    for row in rows:
        if row.runs:
            with suppress(ChildError):  # which was printed
                row.info["grown_bytes"] = growth(row.provider)
                row.cells["MiB grown"] = text.mib(row.info["grown_bytes"])


@contextmanager
def attempt(*rows: Row) -> Iterator[None]:
    """Record an error as the rows' result: another library's failure is worth reporting."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ChildError) else f"{type(error).__name__}: "
        for row in rows:
            row.leave_out("wrong", f"{kind}{error}".strip().splitlines()[0][:200])


def device_is_lost(device: str) -> bool:
    """Return whether a kernel faulted: after that, this process can't use the GPU."""
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def free(device: str) -> None:
    """Free the memory that a provider or its exception left behind."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
