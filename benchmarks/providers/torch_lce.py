"""PyTorch's chunked linear cross entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.problem import Problem
from benchmarks.providers.bare_gemms import CHUNK_ROWS
from benchmarks.providers.base import Provider
from benchmarks.providers.baselines import no_entropy, no_softcap, run_cross_entropy


def _cross_entropy(problem: Problem, reduction: str) -> Tensor:
    rows = CHUNK_ROWS[problem.hidden.device.type]
    return torch.nn.functional.linear_cross_entropy(
        problem.hidden.flatten(0, 1),
        problem.weight,
        problem.target.flatten(),
        reduction=reduction,
        options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows),
    )


def _missing(device: str) -> str | None:
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return None
    return f"torch {torch.__version__} has no chunked linear_cross_entropy"


TORCH_LCE = Provider(
    name="torch-lce",
    note="torch.nn.functional.linear_cross_entropy in the bare GEMMs' chunks of rows (those it "
    "chooses itself are of a few rows, and slow), else its defaults; per-token values in the input "
    "dtype",
    run=run_cross_entropy(_cross_entropy),
    unable=lambda case: no_entropy(case) or no_softcap(case),
    missing=_missing,
)
