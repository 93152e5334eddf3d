"""The kernel that reads logits, next to the time its bytes take; for GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.check import relative_error
from benchmarks.conftest import Session
from benchmarks.measure import attempt, free
from benchmarks.passes import COPY, Pass, copy_pass, race_passes
from benchmarks.results import Row
from benchmarks.shapes import DTYPES
from grpo_kernels.backends import Tile
from grpo_kernels.head import Transform

_CHECKED_ROWS = 64
_ALLOWED = {"logp": 1e-4, "entropy": 1e-3, "gradient": 1e-2}
FORMS = {
    COPY: "of the logits",
    "ours, statistics": "no gradient",
    "ours, gradient": "bf16, over the logits",
}


@dataclass(frozen=True)
class Case:
    """A tile of logits."""

    rows: int
    vocabulary: int
    dtype: str

    def facts(self) -> dict[str, Any]:
        size = {"model": f"logits of {self.vocabulary} tokens", "tokens": self.rows}
        return {"kernel": "row statistics", **size, "dtype": self.dtype}

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.dtype}"


CASES = {
    "tiny": [Case(4, 304, dtype) for dtype in DTYPES],
    "gpu": [Case(8192, 151936, dtype) for dtype in DTYPES],
    "gpu-full": [Case(rows, 151936, dtype) for rows in (1024, 8192) for dtype in DTYPES],
}


def names(case: Case) -> list[str]:
    return list(FORMS)


def measure(case: Case, names: Sequence[str], session: Session) -> list[Row]:
    logits, target = _inputs(case, session.device)
    exact = _exact(logits, target)
    passes = _passes(logits, target)
    rows = [Row(name, FORMS[name]) for name in names]
    for row in rows:
        if row.provider == COPY:
            continue
        with attempt(row):
            passes[row.provider].restore()
            row.errors = _errors(*passes[row.provider].call(), target, exact)
            bad = [f"{k} {x:.1e}" for k, x in row.errors.items() if not x <= _ALLOWED[k]]
            row.leave_out("wrong", f"error of {', '.join(bad)}" if bad else None)
    race_passes(rows, passes, session.rounds(20), session.device)
    passes.clear()
    free(session.device)
    return rows


def _inputs(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """Return peaked logits (T, V) and targets (T,)."""
    generator = torch.Generator(device).manual_seed(1)
    logits = torch.empty(case.rows, case.vocabulary, dtype=DTYPES[case.dtype], device=device)
    logits.normal_(std=2.0, generator=generator)
    target = torch.randint(case.vocabulary, (case.rows,), generator=generator, device=device)
    raised = torch.rand(case.rows, generator=generator, device=device) * 12 - 2
    raised += math.log(case.vocabulary)
    return logits.scatter_(1, target[:, None], raised[:, None].to(logits.dtype)), target


def _passes(logits: Tensor, target: Tensor) -> dict[str, Pass]:
    from grpo_kernels.backends.triton import logp_gradient_, row_stats

    tile, own = (Tile(x, target, Transform()) for x in (logits, logits.clone()))
    both = logits.nbytes + 2 * logits.numel()
    return {
        COPY: copy_pass(logits),
        "ours, statistics": Pass(lambda: (row_stats(tile, False), None), logits.nbytes),
        "ours, gradient": Pass(lambda: logp_gradient_(own), both, lambda: own.logits.copy_(logits)),
    }


def _exact(logits: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return logp (R,), entropy (R,) and the gradient of logp (R, V) of some rows in fp64."""
    place = target[:_CHECKED_ROWS, None]
    logps = logits[:_CHECKED_ROWS].double().log_softmax(1)
    gradient = -logps.exp()
    gradient.scatter_add_(1, place, torch.ones_like(place, dtype=gradient.dtype))
    entropy = -(logps.exp() * logps).sum(1)
    return {"logp": logps.gather(1, place)[:, 0], "entropy": entropy, "gradient": gradient}


def _errors(
    stats: Any, gradient: Any, target: Tensor, exact: dict[str, Tensor]
) -> dict[str, float]:
    count = len(exact["logp"])
    errors = {
        name: (getattr(stats, name)[:count].double() - exact[name]).abs().max().item()
        for name in ("logp", "entropy")
    }
    if gradient is not None:
        scaled = gradient.dlogits[:count].double() * gradient.row_scale[:count, None].double()
        errors["gradient"] = relative_error(scaled, exact["gradient"])
        if any(bool(part.isnan().any()) for part in gradient.dlogits.split(512)):
            errors["gradient"] = math.nan
    return errors


def test_row_kernel(row: Row) -> None:
    """Time the kernel."""
    assert row.seconds
