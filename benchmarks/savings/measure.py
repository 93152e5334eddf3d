"""Every variant checked, then timed in turns."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.check import compare, reference, reference_dtype
from benchmarks.measure import free
from benchmarks.row import SavingsRow, describe
from benchmarks.savings.variants import VARIANTS, Task, Variant
from benchmarks.shapes import Case
from benchmarks.timing import make_timer, quick_collections


def measure_savings(
    case: Case, device: str, rounds: int, deadline: float = float("inf")
) -> dict[str, Any]:
    """An entry of the result file's ``savings`` list, as plain data.

    Args:
        case: head, tokens and dtype; the variants bring their own works.
        device: ``cpu`` or ``cuda``.
        rounds: timed calls of each variant.
        deadline: by ``time.monotonic()``; no round but the first begins after it.
    """
    rows = {variant.name: SavingsRow(variant.name, variant.note) for variant in VARIANTS}
    tasks: dict[str, Task] = {}
    for variant in VARIANTS:
        row, task = rows[variant.name], variant.task(case, device)
        row.base = variant.base
        try:
            _check(row, variant, task)
        except Exception as error:  # the other lines are still worth having
            row.failure = describe(error)
        tasks[variant.name] = task
        free(device)
    _time(rows, tasks, device, rounds, deadline)
    return {
        "model": case.model.name,
        "tokens": case.tokens,
        "hidden": case.model.hidden,
        "vocabulary": case.model.vocabulary,
        "dtype": case.dtype,
        "reference": str(reference_dtype(case, device)).removeprefix("torch."),
        "rows": [asdict(row) for row in rows.values()],
    }


def _check(row: SavingsRow, variant: Variant, task: Task) -> None:
    """Also the warm-up."""
    found = compare(variant.run(task), variant.expected(task, reference), task.exact)
    row.errors, row.failure = found.errors, found.failure


def _time(
    rows: dict[str, SavingsRow], tasks: dict[str, Task], device: str, rounds: int, deadline: float
) -> None:
    timer = make_timer(device)
    timed = [variant for variant in VARIANTS if rows[variant.name].runs]
    for index in range(rounds):
        if index > 0 and time.monotonic() > deadline:
            break
        # every other round backwards, so that nobody always follows the same one
        with quick_collections():
            for variant in timed if index % 2 == 0 else reversed(timed):
                call = partial(variant.run, tasks[variant.name])
                rows[variant.name].seconds.append(timer(call))
