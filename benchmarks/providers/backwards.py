"""The backwards of our ops."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.problem import Problem
from benchmarks.providers.base import Provider
from benchmarks.providers.ours import run_work
from grpo_kernels import Bounded, linear_logprobs

_UNLIMITED = 1 << 60


def _entries(problem: Problem, backward: Bounded) -> dict[str, Any]:
    """Return how many entries rows keep that are not exact, and how many are."""
    if problem.work.kind != "backward":
        return {}
    inputs, softcap = (problem.hidden, problem.weight, problem.target), problem.softcap
    out = linear_logprobs(
        *inputs, softcap=softcap, backward=backward, outputs=("logprobs", "entries")
    )
    assert out.entries is not None
    found = out.entries.flatten().tolist()
    kept = [count for count in found if count >= 0]  # -1: the row is exact
    exact = 1 - len(kept) / len(found)
    return {"entries": [fmean(kept), max(kept)] if kept else [], "exact_share": exact}


def _bounded(tolerance: str) -> Provider:
    backward = Bounded(tolerance=float(tolerance), exact_weight=False)
    return Provider(
        name=f"ours-bounded-{tolerance}",
        note=f"backward=Bounded(tolerance={tolerance}, exact_weight=False)",
        run=partial(run_work, settings={"backward": backward}),
        info=partial(_entries, backward=backward),
        tolerance=float(tolerance),
    )


AGAIN = Provider(
    name="ours-again",
    note="activation_bytes=0: nothing is kept, and the op's backward forms the logits again",
    run=partial(run_work, settings={"activation_bytes": 0}),
)
KEPT = Provider(
    name="ours-kept",
    note="what the op's backward needs is kept, exact: dhidden, as by default, or with "
    "activation_bytes the logits' gradient",
    run=partial(run_work, settings={"activation_bytes": _UNLIMITED}),
)
BOUNDED = tuple(map(_bounded, ("1e-2", "2e-3", "5e-4")))
OURS = (AGAIN, KEPT, *BOUNDED)
