"""How exact the loss stays on inputs that are hard for kernels, against fp64, and its bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import text
from benchmarks.check import compare, reference, same_bits, same_rows
from benchmarks.conftest import Session
from benchmarks.measure import attempt, free
from benchmarks.problem import Problem, Result, detached, make_problem, statistics
from benchmarks.providers import EVERY
from benchmarks.results import Row
from benchmarks.shapes import DECIDED, Case, make_case
from benchmarks.timing import make_timer

_ALLOWED = 6e-3  # of a gradient's norm, and of a loss: bf16 rounds by 2e-3
PROVIDERS = ("ours", "ours-one-pass", "ours-two-pass")


@dataclass(frozen=True)
class Inputs:
    """A problem whose rows are changed."""

    name: str
    case: Case
    nats: float = 0.0  # by how much every other target lies below the row's best token
    poisoned: bool = False  # whether a row of NaN is masked

    def facts(self) -> dict[str, Any]:
        return self.case.facts() | {"kernel": self.name}

    def __str__(self) -> str:
        return f"{self.name}, {self.case}"

    def make(self, device: str) -> Problem:
        problem = make_problem(self.case, device)
        if self.nats:
            problem = _with_rare_targets(problem, self.nats)
        return _with_nan_row(problem) if self.poisoned else problem


def _inputs(model: str, tokens: int, dtype: str = "bf16") -> list[Inputs]:
    peaked = make_case("dapo", model, tokens, dtype)
    return [
        Inputs("peaked", peaked),
        Inputs("mostly decided", make_case("dapo", model, tokens, dtype, DECIDED)),
        Inputs("targets at e^-60", peaked, nats=60.0),
        Inputs("targets at e^-100", peaked, nats=100.0),
        Inputs("a row of NaN that is masked", peaked, poisoned=True),
    ]


CASES = {
    "tiny": _inputs("tiny", 32),
    "gpu": [*_inputs("qwen3-1.7b", 1024), *_inputs("qwen3-8b", 1024)],
}
CASES["gpu-full"] = CASES["gpu"]


def names(inputs: Inputs) -> list[str]:
    return list(PROVIDERS)


def measure(inputs: Inputs, names: Sequence[str], session: Session) -> list[Row]:
    problem = inputs.make(session.device)
    exact = reference(_without_nan(problem))
    rows, timer = [], make_timer(session.device)
    for name in names:
        row = Row(name, EVERY[name].note)
        with attempt(row):
            row.leave_out("unable", EVERY[name].redundant(problem))
            if row.runs:
                run = partial(EVERY[name].run, problem)
                _check(row, run, problem, exact)
                row.seconds = [timer(run) for _ in range(session.rounds(3))] * row.runs
        rows.append(row)
        free(session.device)
    return rows


def _check(row: Row, run: Callable[[], Result], problem: Problem, exact: Result) -> None:
    """Compare with fp64, and bits with those of a second run and of half of the batch."""
    result = run()
    row.errors, wrong = compare(result, exact, problem, _ALLOWED)
    row.info["repeatable"] = same_bits(run(), result, problem)
    half = problem.half()
    row.info["batch_invariant"] = same_rows(EVERY[row.provider].run(half), result, half)
    on_gpu = problem.hidden.device.type == "cuda"
    for name in ("repeatable", "batch_invariant") if on_gpu else ():
        wrong = wrong or (None if row.info[name] else f"not {name}")
    row.leave_out("wrong", wrong)
    row.cells = {name: "yes" if x else "no" for name, x in row.info.items()}
    row.cells |= {name: text.error(x) for name, x in row.errors.items()}


def _with_rare_targets(problem: Problem, nats: float) -> Problem:
    """Point every other row at a token that is not its target, which is so far below it."""
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


def _without_nan(problem: Problem) -> Problem:
    clean: Tensor = problem.hidden.detach().nan_to_num(0.0)
    return replace(problem, hidden=clean.requires_grad_())


def test_exactness(row: Row) -> None:
    """Compare a loss and its gradients."""
    assert row.errors
