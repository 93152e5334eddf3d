"""torch.compile of the eager head."""

from __future__ import annotations

import functools

import torch

from benchmarks.problem import Problem, Result
from benchmarks.providers.base import Provider
from benchmarks.providers.eager import Head, head, run_with
from benchmarks.shapes import Case


def _run(problem: Problem) -> Result:
    return run_with(_compiled(problem.case))(problem)


@functools.lru_cache(maxsize=1)
def _compiled(case: Case) -> Head:
    """Compile the head anew for a case, so that no other case's graph or limit affects it."""
    torch._dynamo.reset()
    return torch.compile(head, dynamic=False)


COMPILE = Provider(
    name="compile",
    note="torch.compile of eager's head, its defaults, each shape by itself (dynamic=False); "
    "the loss on top is eager; no entropy in a loss",
    run=_run,
    slow_start=True,
)
