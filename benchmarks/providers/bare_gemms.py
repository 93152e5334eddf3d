"""The bare GEMMs of the work: what every exact implementation pays."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.problem import Problem, Result
from benchmarks.providers.base import Provider

CHUNK_ROWS = {"cpu": 512, "cuda": 4096}


def _run(problem: Problem) -> Result:
    """Multiply for logits, dhidden and dweight; the logits stand in for their gradient."""
    kept, weight = _rows(problem), problem.weight.detach()
    hidden = problem.hidden.detach().flatten(0, 1)
    if kept is not None:
        hidden = hidden[kept]
    size = CHUNK_ROWS[hidden.device.type]
    tile = hidden.new_empty(min(size, hidden.shape[0]), weight.shape[0])
    trains = problem.hidden.requires_grad
    dhidden = torch.empty_like(hidden) if trains else None
    dweight = torch.empty_like(weight) if problem.weight.requires_grad else None
    for start in range(0, hidden.shape[0], size):
        rows = hidden[start : start + size]
        logits = torch.mm(rows, weight.t(), out=tile[: rows.shape[0]])
        if dhidden is not None:
            torch.mm(logits, weight, out=dhidden[start : start + size])
        if dweight is not None:
            torch.addmm(dweight, logits.t(), rows, beta=0 if start == 0 else 1, out=dweight)
    return Result(dhidden=dhidden, dweight=dweight)


def _rows(problem: Problem) -> Tensor | None:
    """Index of the tokens that cannot be left out; None: all."""
    if problem.work.rows == "all":
        return None
    needed = problem.mask
    if problem.work.rows == "zero":
        needed = needed & (problem.advantages != 0)[:, None]
    return needed.flatten().nonzero().squeeze(-1)


BARE_GEMMS = Provider(
    name="bare-gemms",
    note="the bare torch.mm of the rows that matter, in chunks, in the input dtype; no loss",
    run=_run,
    checked=False,
)
