"""Interleaved timing of checked providers."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.check import (
    Check,
    check_logprobs,
    check_loss,
    reference_logprobs,
    reference_loss,
)
from benchmarks.memory import Memory, measure_memory
from benchmarks.problem import Problem, make_problem
from benchmarks.providers.base import Provider
from benchmarks.shapes import DTYPES, Shape

WORKS = ("loss", "logprobs")


@dataclass
class Row:
    """One provider's line of the table; without seconds where it is absent or failed."""

    provider: Provider
    absent: str | None = None
    check: Check = field(default_factory=Check)
    seconds: list[float] = field(default_factory=list)
    memory: Memory | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def minimum(self) -> float | None:
        return min(self.seconds, default=None)

    @property
    def runs(self) -> bool:
        return self.absent is None and self.check.passed


def measure(
    providers: list[Provider],
    shape: Shape,
    dtype: str,
    work: str,
    rounds: int,
    memory: bool = True,
) -> list[Row]:
    """Checks every provider, times those that passed, and measures their memory.

    A round runs each once, so that a change of the machine's load meets them all. A provider that
    has no such work, or not this dtype, is left out.
    """
    able = [
        provider
        for provider in providers
        if DTYPES[dtype] in provider.dtypes and getattr(provider, work) is not None
    ]
    rows = [Row(provider, provider.absent()) for provider in able]
    present = [row for row in rows if row.absent is None]
    if memory:  # while this process is small
        for row in present:
            row.memory = measure_memory(shape, dtype, work, row.provider.name)
    problem = make_problem(shape, DTYPES[dtype])
    _check(present, problem, work)
    running = [row for row in present if row.runs]
    for index in range(rounds):
        # every other round backwards, so that nobody always follows the same one
        for row in running if index % 2 == 0 else reversed(running):
            row.seconds.append(seconds(getattr(row.provider, work), problem))
    return rows


def seconds(call: Callable[[Problem], Any], problem: Problem) -> float:
    """Wall time of one call; freeing its result is not part of it."""
    gc.collect()
    start = time.perf_counter()
    result = call(problem)
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def _check(rows: list[Row], problem: Problem, work: str) -> None:
    """This run is also the warm-up."""
    if work == "loss":
        reference = reference_loss(problem)
        for row in rows:
            row.check = check_loss(row.provider, problem, reference)
        return
    with torch.no_grad():
        logprobs = reference_logprobs(problem)
    for row in rows:
        row.check = check_logprobs(row.provider, problem, logprobs)
