"""Candidates for the rows of the logits tile: a whole loss, forward and backward."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.candidates import Candidate, difference
from benchmarks.problem import Problem
from benchmarks.providers.ours import run_loss
from grpo_kernels.backends.configs.rows import default_chunk_rows
from grpo_kernels.head import logits_dtype

_ROWS = (1024, 2048, 4096, 8192, 16384)
_TOLERANCE = 1e-2  # of 16-bit gradients whose sums differ in order


def chunk_rows(dtype: torch.dtype, columns: int) -> list[int]:
    """Return the numbers of rows to try, the default first."""
    return list(dict.fromkeys([default_chunk_rows(dtype, columns), *_ROWS]))


def candidates(problem: Problem, precision: str) -> list[Candidate]:
    """Return the candidates for one head. ``precision`` decides the dtype of the logits."""
    dtype, columns = logits_dtype(problem.hidden.dtype, precision), len(problem.weight)
    counts = chunk_rows(dtype, columns)
    row_bytes = columns * dtype.itemsize

    def run(rows: int) -> dict[str, Tensor]:
        settings = {"precision": precision, "max_workspace_bytes": rows * row_bytes}
        result = run_loss(problem, settings)
        return {name: getattr(result, name) for name in problem.work.outputs}

    want = run(counts[0])

    def check(rows: int) -> str | None:
        return difference(run(rows), want, _TOLERANCE)

    return [
        Candidate(value=(rows,), check=partial(check, rows), run=partial(run, rows))
        for rows in counts
    ]
