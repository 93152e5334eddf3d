"""Candidates for the rows of the logits tile: a whole loss, forward and backward."""

from __future__ import annotations

import torch

from benchmarks.check import relative_error
from benchmarks.problem import Problem, Result
from benchmarks.providers.base import with_gradients
from benchmarks.tune.contest import Candidate
from grpo_kernels import linear_policy_loss
from grpo_kernels.backends.configs.rows import DEFAULT_CHUNK_ROWS
from grpo_kernels.head import logits_dtype

_ROWS = (1024, 2048, 4096, 8192)
_TOLERANCE = 1e-2  # of 16-bit gradients whose sums differ in order


def chunk_rows() -> list[int]:
    """Return the numbers of rows to try, the default first."""
    return list(dict.fromkeys([DEFAULT_CHUNK_ROWS, *_ROWS]))


def candidates(problem: Problem, precision: str) -> list[Candidate]:
    """Return the candidates for one head. ``precision`` decides the dtype of the logits."""
    want = _run(problem, precision, DEFAULT_CHUNK_ROWS)
    return [_candidate(problem, precision, rows, want) for rows in chunk_rows()]


def _candidate(problem: Problem, precision: str, rows: int, want: Result) -> Candidate:
    def run() -> Result:
        return _run(problem, precision, rows)

    def check() -> str | None:
        got = run()
        for name in ("loss", "dhidden", "dweight"):
            error = relative_error(getattr(got, name), getattr(want, name))
            if not error <= _TOLERANCE:
                return f"{name} differs by {error:.1e}"
        return None

    return Candidate(value=(rows,), check=check, prepare=lambda: None, run=run)


def _run(problem: Problem, precision: str, rows: int) -> Result:
    columns = problem.weight.shape[0]
    row_bytes = columns * logits_dtype(problem.hidden.dtype, precision).itemsize
    loss, _ = linear_policy_loss(
        problem.hidden,
        problem.weight,
        problem.batch(),
        problem.loss,
        precision=precision,
        max_workspace_bytes=rows * row_bytes,
    )
    return with_gradients(problem, loss, loss=loss)


def precision_of(dtype: torch.dtype) -> str:
    """Return the precision that keeps the logits of 16-bit inputs in ``dtype``."""
    return "fp32" if dtype == torch.float32 else "input"
