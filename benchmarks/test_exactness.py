"""Errors of the loss on inputs that are hard for kernels, against fp64, and its bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks import text
from benchmarks.check import compare, same_bits, same_rows
from benchmarks.conftest import Session, check_row
from benchmarks.measure import Settings
from benchmarks.measure import measure as measured
from benchmarks.problem import Problem, Result, detached, statistics
from benchmarks.providers import EVERY
from benchmarks.providers.base import Provider
from benchmarks.results import Row
from benchmarks.shapes import DECIDED, Case, make_case

_ALLOWED = 6e-3  # of a gradient's norm, and of a loss: bf16 rounds by 2e-3
NOTES = {name: EVERY[name].note for name in ("ours", "ours-one-pass", "ours-two-pass")}


def _inputs(model: str, tokens: int) -> list[Case]:
    peaked = make_case("dapo", model, tokens, "bf16")
    return [
        replace(peaked, title="peaked"),
        replace(make_case("dapo", model, tokens, "bf16", DECIDED), title="mostly decided"),
        replace(peaked, title="targets at e^-60", change=partial(_with_rare_targets, 60.0)),
        replace(peaked, title="targets at e^-100", change=partial(_with_rare_targets, 100.0)),
        replace(peaked, title="a row of NaN that is masked", change=_with_nan_row),
    ]


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    calls = [(EVERY[row.provider], case, row) for row in rows]
    settings = replace(session.settings(case), rounds=session.rounds(3))
    measured(calls, settings, _check)


def _check(
    provider: Provider, row: Row, problem: Problem, exact: Result, settings: Settings
) -> None:
    """Compare with fp64, and bits with a second run and with half of the batch."""
    result = provider.run(problem)
    row.errors, wrong = compare(result, exact, problem, _ALLOWED)
    row.info["repeatable"] = same_bits(provider.run(problem), result, problem)
    half = problem.half()
    row.info["batch_invariant"] = same_rows(provider.run(half), result, half)
    for name in ("repeatable", "batch_invariant") if settings.device == "cuda" else ():
        wrong = wrong or (None if row.info[name] else f"not {name}")
    row.leave_out("wrong", wrong)
    row.cells = {name: "yes" if x else "no" for name, x in row.info.items()}
    row.cells |= {name: text.error(x) for name, x in row.errors.items()}


def _with_rare_targets(nats: float, problem: Problem) -> Problem:
    """Make another token far more likely than the target in every other row."""
    hidden, weight = problem.hidden.detach().flatten(0, 1).clone(), problem.weight.detach()
    target, rows = problem.target.flatten(), torch.arange(0, problem.case.tokens, 2)
    best = (target[rows] + 1) % problem.case.model.vocabulary
    direction = weight[best].float()
    direction /= direction.square().sum(1, keepdim=True)
    hidden[rows] = (nats * direction).to(hidden.dtype)
    leaf = hidden.view_as(problem.hidden).requires_grad_()
    moved = replace(problem, hidden=leaf)
    exact = detached(moved, torch.float64)
    inputs = exact.hidden.flatten(0, 1), target, exact.weight
    logprobs, _ = statistics(*inputs, problem.softcap)
    old = logprobs.view_as(problem.target) - 0.1  # no row is clipped
    return replace(moved, old_logprobs=old.float())


def _with_nan_row(problem: Problem) -> Problem:
    """Mask a row of NaN in each half, so that half of the batch has half of the tokens."""
    hidden, mask = problem.hidden.detach().clone(), problem.mask.clone()
    rows = [0, len(mask) // 2]
    hidden[rows, 0], mask[rows, 0] = float("nan"), False
    return replace(problem, hidden=hidden.requires_grad_(), mask=mask)


CASES = {
    "tiny": _inputs("tiny", 32),
    "gpu": [*_inputs("qwen3-1.7b", 1024), *_inputs("qwen3-8b", 1024)],
}
CASES["gpu-full"] = CASES["gpu"]
test_exactness = check_row
