"""The bare matrix products: what every exact implementation pays."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.problem import Problem, Result
from benchmarks.providers.base import Provider

CHUNK_ROWS = 512


def _loss(problem: Problem) -> Result:
    """Logits, dhidden and dweight products; the logits stand in for their gradient."""
    hidden = problem.hidden.detach().flatten(0, 1)
    weight = problem.weight.detach()
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)
    tile = _tile(hidden, weight)
    for start in range(0, hidden.shape[0], CHUNK_ROWS):
        rows = hidden[start : start + CHUNK_ROWS]
        logits = torch.mm(rows, weight.t(), out=tile[: rows.shape[0]])
        torch.mm(logits, weight, out=dhidden[start : start + CHUNK_ROWS])
        torch.addmm(dweight, logits.t(), rows, beta=0 if start == 0 else 1, out=dweight)
    zero = torch.zeros((), dtype=torch.float32)
    return Result(zero, dhidden.view_as(problem.hidden), dweight)


def _logprobs(problem: Problem) -> Tensor:
    hidden = problem.hidden.detach().flatten(0, 1)
    weight = problem.weight.detach()
    tile = _tile(hidden, weight)
    for start in range(0, hidden.shape[0], CHUNK_ROWS):
        rows = hidden[start : start + CHUNK_ROWS]
        torch.mm(rows, weight.t(), out=tile[: rows.shape[0]])
    return torch.zeros(problem.target.shape)


def _tile(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.new_empty(min(CHUNK_ROWS, hidden.shape[0]), weight.shape[0])


FLOOR = Provider(
    name="floor",
    note=f"three bare torch.mm in {CHUNK_ROWS}-row chunks, no loss (one for log-probabilities)",
    loss=_loss,
    logprobs=_logprobs,
    checked=False,
)
