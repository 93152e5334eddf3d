"""Candidates for the rows of the logits tile: a whole loss, forward and backward."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from benchmarks.problem import Problem
from benchmarks.providers.ours import run_loss
from benchmarks.tune.contest import Candidate, difference
from grpo_kernels.backends.configs.rows import DEFAULT_CHUNK_ROWS
from grpo_kernels.head import logits_dtype

_ROWS = (1024, 2048, 4096, 8192)
_TOLERANCE = 1e-2  # of 16-bit gradients whose sums differ in order


def chunk_rows() -> list[int]:
    """Return the numbers of rows to try, the default first."""
    return list(dict.fromkeys([DEFAULT_CHUNK_ROWS, *_ROWS]))


def candidates(problem: Problem, precision: str) -> list[Candidate]:
    """Return the candidates for one head. ``precision`` decides the dtype of the logits."""
    row_bytes = len(problem.weight) * logits_dtype(problem.hidden.dtype, precision).itemsize

    def run(rows: int) -> dict[str, Tensor]:
        settings = {"precision": precision, "max_workspace_bytes": rows * row_bytes}
        result = run_loss(problem, settings)
        return {name: getattr(result, name) for name in problem.work.outputs}

    want = run(DEFAULT_CHUNK_ROWS)

    def check(rows: int) -> str | None:
        return difference(run(rows), want, _TOLERANCE)

    return [
        Candidate(value=(rows,), check=partial(check, rows), run=partial(run, rows))
        for rows in chunk_rows()
    ]
