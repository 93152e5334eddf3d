"""Apple's Cut Cross-Entropy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.problem import Problem
from benchmarks.providers.base import Provider
from benchmarks.providers.baselines import CrossEntropy, no_entropy, run_cross_entropy
from benchmarks.shapes import Case

_IGNORED = -100


def _cross_entropy(**settings: Any) -> CrossEntropy:
    def call(problem: Problem, reduction: str) -> Tensor:
        from cut_cross_entropy import linear_cross_entropy

        target = problem.target
        if problem.work.rows == "masked":  # it computes nothing for an ignored target
            target = target.masked_fill(~problem.mask, _IGNORED)
        return linear_cross_entropy(
            problem.hidden.flatten(0, 1),
            problem.weight,
            target.flatten(),
            ignore_index=_IGNORED,
            softcap=problem.softcap,
            reduction=reduction,
            **settings,
        )

    return call


def _unable(case: Case) -> str | None:
    if case.dtype == "fp32" and case.work.kind != "forward":
        return "gradients of 16-bit inputs only"
    return no_entropy(case)


def _provider(name: str, note: str, **settings: Any) -> Provider:
    return Provider(
        name=name,
        note=f"cut_cross_entropy.linear_cross_entropy, masked tokens as ignored targets, {note}",
        run=run_cross_entropy(_cross_entropy(**settings)),
        unable=_unable,
        packages=("cut-cross-entropy",),
        gpu=True,
        timeout=90.0,  # its kernels wait for each other on locks, and may do so forever
    )


CCE = _provider("cce", "its default: blocks of small gradients are left out")
CCE_EXACT = _provider("cce-exact", "filter_eps=None: no gradient is left out", filter_eps=None)
