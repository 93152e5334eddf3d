"""The kernel that reads logits, next to a copy of its bytes; for GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.check import relative_error
from benchmarks.conftest import Session, check_row
from benchmarks.passes import COPY, Pass, copy_pass, race_passes
from benchmarks.results import Row
from benchmarks.shapes import DTYPES, Shape
from grpo_kernels.backends import Tile
from grpo_kernels.head import Transform

_CHECKED_ROWS = 64
_ALLOWED = {"logprobs": 1e-4, "entropy": 1e-3, "gradient": 1e-2}
NOTES = {
    COPY: "of the logits",
    "ours, statistics": "no gradient",
    "ours, gradient": "bf16, over the logits",
}


def _logits(rows: int, vocabulary: int, dtype: str) -> Shape:
    size = {"model": f"logits of {vocabulary} tokens", "tokens": rows}
    facts = {"kernel": "row statistics", **size, "dtype": dtype}
    return Shape(f"{rows} rows, {dtype}", facts)


_COLUMNS = {"tiny": 304, "gpu": 151936, "gpu-full": 151936}
_ROWS = {"tiny": (4,), "gpu": (8192,), "gpu-full": (1024, 8192)}
CASES = {
    suite: [_logits(count, _COLUMNS[suite], dtype) for count in counts for dtype in DTYPES]
    for suite, counts in _ROWS.items()
}


def measure(case: Shape, rows: Sequence[Row], session: Session) -> None:
    columns = _COLUMNS["tiny" if session.suite == "tiny" else "gpu"]
    logits, target = _inputs(case["tokens"], columns, DTYPES[case["dtype"]], session.device)
    race_passes(rows, _passes(logits, target), _ALLOWED, session)


def _inputs(rows: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return peaked logits (T, V) and targets (T,)."""
    generator = torch.Generator(device).manual_seed(1)
    logits = torch.empty(rows, columns, dtype=dtype, device=device)
    logits.normal_(std=2.0, generator=generator)
    target = torch.randint(columns, (rows,), generator=generator, device=device)
    raised = torch.rand(rows, generator=generator, device=device) * 12 - 2 + math.log(columns)
    return logits.scatter_(1, target[:, None], raised[:, None].to(dtype)), target


def _passes(logits: Tensor, target: Tensor) -> dict[str, Pass]:
    from grpo_kernels.backends.triton import logp_gradient_, row_stats

    tile, own = (Tile(x, target, Transform()) for x in (logits, logits.clone()))
    both, errors = logits.nbytes + 2 * logits.numel(), partial(_errors, _exact(logits, target))
    return {
        COPY: copy_pass(logits),
        "ours, statistics": Pass(
            lambda: (row_stats(tile, False), None), logits.nbytes, errors=errors
        ),
        "ours, gradient": Pass(
            lambda: logp_gradient_(own), both, lambda: own.logits.copy_(logits), errors
        ),
    }


def _exact(logits: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return logp (R,), entropy (R,) and the gradient of logp (R, V) of some rows in fp64."""
    place = target[:_CHECKED_ROWS, None]
    logps = logits[:_CHECKED_ROWS].double().log_softmax(1)
    gradient = -logps.exp()
    gradient.scatter_add_(1, place, torch.ones_like(place, dtype=gradient.dtype))
    entropy = -(logps.exp() * logps).sum(1)
    return {"logprobs": logps.gather(1, place)[:, 0], "entropy": entropy, "gradient": gradient}


def _errors(exact: dict[str, Tensor], found: tuple[Any, Any]) -> dict[str, float]:
    stats, gradient = found
    count = len(exact["logprobs"])
    errors = {
        name: (getattr(stats, name)[:count].double() - exact[name]).abs().max().item()
        for name in ("logprobs", "entropy")
    }
    if gradient is not None:
        scaled = gradient.dlogits[:count].double() * gradient.row_scale[:count, None].double()
        errors["gradient"] = relative_error(scaled, exact["gradient"])
        if any(bool(part.isnan().any()) for part in gradient.dlogits.split(512)):
            errors["gradient"] = math.nan
    return errors


test_row_kernel = check_row
