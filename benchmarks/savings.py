"""What a step saves: the same op on one batch, with more or less to do, in turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.check import compare, reference, reference_dtype
from benchmarks.measure import describe, free, in_turns
from benchmarks.problem import Problem, Result, make_problem
from benchmarks.providers.base import with_gradients
from benchmarks.results import SavingsRow, SavingsTable
from benchmarks.shapes import Case
from benchmarks.timing import make_timer
from benchmarks.work import WORKS
from grpo_kernels import HeadLoRA, linear_policy_loss

_RANK, _SCALING = 16, 2.0
_UPDATE = 0.02  # standard deviation of what the adapter adds to a logit


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a variant runs on, and what its results are compared with."""

    problem: Problem
    exact: Problem  # the same for the reference: an adapter is merged
    lora: HeadLoRA | None = None


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line of the table."""

    name: str
    note: str
    work: str  # a name of WORKS
    base: str | None = None  # the variant whose time it is measured by
    metric_rows: str = "all"
    adapted: bool = False  # LoRA on the head

    def task(self, case: Case, device: str) -> Task:
        """Make its batch; the inputs are the same for all variants."""
        problem = make_problem(replace(case, work=WORKS[self.work]), device)
        if not self.adapted:
            return Task(problem=problem, exact=problem)
        lora = _adapter(problem)
        delta = lora.scaling * (lora.b.detach() @ lora.a.detach())
        merged = (problem.weight.detach().float() + delta).requires_grad_()
        full = replace(problem.case, work=WORKS[self.work.removesuffix("-frozen")])
        return Task(problem=problem, exact=replace(problem, case=full, weight=merged), lora=lora)

    def run(self, task: Task) -> Result:
        """Compute loss and gradients; of an adapter its factors' in place of the weight's."""
        problem, lora = task.problem, task.lora
        loss, _ = linear_policy_loss(
            problem.hidden,
            problem.weight,
            problem.batch(),
            problem.loss,
            softcap=problem.softcap,
            metric_rows=self.metric_rows,
            lora=lora,
        )
        if lora is None:
            return with_gradients(problem, loss, loss=loss)
        dhidden, da, db = torch.autograd.grad(loss, (problem.hidden, lora.a, lora.b))
        flat = torch.cat([da.flatten(), db.flatten()])
        return Result(loss=loss.detach(), dhidden=dhidden, dweight=flat)

    def expected(self, task: Task) -> Result:
        """Compute the same by the reference."""
        exact, lora = reference(task.exact), task.lora
        if lora is None:
            return exact
        assert exact.dweight is not None
        a, b = lora.a.detach().to(exact.dweight), lora.b.detach().to(exact.dweight)
        da, db = lora.scaling * (b.t() @ exact.dweight), lora.scaling * (exact.dweight @ a.t())
        return replace(exact, dweight=torch.cat([da.flatten(), db.flatten()]))


def _adapter(problem: Problem) -> HeadLoRA:
    """Make factors in fp32, as PEFT keeps them."""
    generator = torch.Generator().manual_seed(2)
    columns, hidden = problem.weight.shape

    def factor(shape: tuple[int, int], std: float) -> Tensor:
        values = torch.randn(shape, generator=generator) * std
        return values.to(problem.weight.device).requires_grad_()

    # a row of hidden states is about as long as the largest: its norm decides the update's size
    length = problem.hidden.detach().float().norm(dim=-1).mean().item()
    a = factor((_RANK, hidden), 1 / length)
    return HeadLoRA(
        a=a, b=factor((columns, _RANK), _UPDATE / (_SCALING * _RANK**0.5)), scaling=_SCALING
    )


VARIANTS = (
    Variant(name="all", note="every token has a gradient", work="dapo"),
    Variant(name="masked", note="half of the tokens masked", work="dapo-masked", base="all"),
    Variant(
        name="zero",
        note='half of the tokens at zero advantage, metric_rows="all": they take the forward',
        work="dapo-zero",
        base="all",
    ),
    Variant(
        name="zero-active",
        note='half of the tokens at zero advantage, metric_rows="active": they take nothing',
        work="dapo-zero",
        base="all",
        metric_rows="active",
    ),
    Variant(name="frozen", note="the head is frozen", work="dapo-frozen", base="all"),
    Variant(
        name="lora",
        note=f"the head is frozen under LoRA of rank {_RANK} in fp32",
        work="dapo-frozen",
        base="frozen",
        adapted=True,
    ),
)


def measure_savings(
    case: Case, device: str, rounds: int, deadline: float = float("inf")
) -> SavingsTable:
    """Measure every variant in turns.

    Args:
        case: head, tokens and dtype; the variants bring their own works.
        device: ``cpu`` or ``cuda``.
        rounds: timed calls of each variant.
        deadline: by ``time.monotonic()``; no round but the first begins after it.
    """
    rows = {variant.name: SavingsRow(variant.name, variant.note) for variant in VARIANTS}
    tasks: dict[str, Task] = {}
    for variant in VARIANTS:
        row, task = rows[variant.name], variant.task(case, device)
        row.base = variant.base
        try:
            _check(row, variant, task)
        except Exception as error:  # the other lines are still worth having
            row.failure = describe(error)
        tasks[variant.name] = task
        free(device)
    timer = make_timer(device)
    runs = [
        (rows[variant.name], partial(variant.run, tasks[variant.name]))
        for variant in VARIANTS
        if rows[variant.name].runs
    ]
    for row, call in in_turns(runs, rounds, deadline):
        row.seconds.append(timer(call))
    facts = case.facts()
    del facts["work"], facts["softcap"]
    exact = str(reference_dtype(case, device)).removeprefix("torch.")
    return SavingsTable(**facts, reference=exact, rows=list(rows.values()))


def _check(row: SavingsRow, variant: Variant, task: Task) -> None:
    """Check a variant; also its warm-up."""
    found = compare(variant.run(task), variant.expected(task), task.exact)
    row.errors, row.failure = found.errors, found.failure
