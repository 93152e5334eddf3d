"""Every backward on one batch: checked, its memory measured, and timed in turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.backwards.providers import BARE, BARE_WORK, USUAL, Ours, ways
from benchmarks.check import TOLERANCE, compare, reference, reference_dtype
from benchmarks.child import memory_alone
from benchmarks.measure import describe, free, in_turns
from benchmarks.problem import Problem, Result, make_problem
from benchmarks.providers.base import Provider
from benchmarks.results import BackwardsRow, BackwardsTable
from benchmarks.shapes import Case
from benchmarks.timing import make_timer, measure_memory
from benchmarks.work import WORKS

# a part of a gradient's norm; rounding logits to 16 bits changes it by less
_WRONG = 0.5
_MEMORY_WORK = "logprobs-grad"
_DIGITS = 6  # of a stored number


@dataclass(frozen=True)
class _Call:
    row: BackwardsRow
    provider: Provider
    case: Case


def measure_backwards(
    case: Case,
    device: str,
    rounds: int,
    *,
    memory: bool = True,
    slow: bool = True,
    deadline: float = float("inf"),
) -> BackwardsTable:
    """Measure every backward on the head, tokens, dtype and inputs of ``case``.

    Args:
        memory: also on a CPU, in a process for each of those that are worth it.
        slow: also those that compile for long.
        deadline: by ``time.monotonic()``; no round but the first begins after it.
    """
    calls = list(_calls(case, device, slow))
    if memory and device == "cpu":  # while this process is small
        for call in calls:
            if call.row.runs and _memory_matters(call):
                call.row.memory = memory_alone(call.case, call.provider)
    exact = _checked(calls, device)
    timer = make_timer(device)
    runs = [
        (call.row, partial(call.provider.run, make_problem(call.case, device)))
        for call in calls
        if call.row.runs
    ]
    for row, run in in_turns(runs, rounds, deadline):
        row.seconds.append(timer(run))
    facts = case.facts()
    del facts["work"], facts["softcap"]
    return BackwardsTable(
        **facts,
        inputs=case.inputs,
        reference=str(reference_dtype(case, device)).removeprefix("torch."),
        logprobs=_numbers(exact.logprobs),
        entropy=_numbers(exact.entropy),
        rows=[call.row for call in calls],
    )


def _calls(case: Case, device: str, slow: bool) -> Iterator[_Call]:
    """List everybody, work by work."""
    for work, providers in {BARE_WORK: (BARE,), **ways(case.inputs)}.items():
        of_work = replace(case, work=WORKS[work])
        for provider in providers:
            absent = provider.absent(device)
            if provider.slow_start and not slow:
                absent = "starts slowly: not in this case"
            row = BackwardsRow(
                provider.name,
                provider.note,
                absent=absent,
                unable=provider.unable(of_work),
                work=work,
            )
            yield _Call(row, provider, of_work)


def _memory_matters(call: _Call) -> bool:
    measured = isinstance(call.provider, Ours) and call.provider.tolerance in (0, USUAL.tolerance)
    return call.row.work == _MEMORY_WORK and (measured or call.provider.name == "eager")


def _checked(calls: list[_Call], device: str) -> Result:
    """Check all, which also warms them up; return the exact values of the op."""
    exact, values = {}, Result()
    for call in calls:
        problem = make_problem(call.case, device)
        kind = problem.work.kind
        if kind not in exact:  # a frozen head's is a part of the other
            exact = {kind: reference(problem)}
        if kind == "backward":
            values = Result(logprobs=exact[kind].logprobs, entropy=exact[kind].entropy)
        if call.row.runs:
            try:
                _check(call, problem, exact[kind])
            except Exception as error:  # another library's failure is a result to report
                call.row.failure = describe(error)
        free(device)
    return values


def _check(call: _Call, problem: Problem, exact: Result) -> None:
    row, provider = call.row, call.provider
    if problem.hidden.device.type == "cuda":
        row.memory, result = measure_memory(provider.run, problem)
    else:
        result = provider.run(problem)
    if not provider.checked:
        return
    allowed = _WRONG
    if isinstance(provider, Ours) or provider.name == "ours":
        allowed = TOLERANCE[problem.case.dtype]
    if isinstance(provider, Ours):
        allowed += provider.tolerance
        row.entries = provider.entries(problem)
    found = compare(result, exact, problem, allowed)
    row.errors, row.failure = found.errors, found.failure


def _numbers(x) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in x.flatten().tolist()]
