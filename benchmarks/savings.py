"""What a step saves: the same op on one batch, with more or less to do, in turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.check import compare, reference, reference_dtype
from benchmarks.measure import describe, free, in_turns
from benchmarks.problem import Problem, Result, make_problem
from benchmarks.providers.ours import policy_loss_of, run_loss
from benchmarks.results import SavingsRow, SavingsTable
from benchmarks.shapes import Case
from benchmarks.timing import make_timer
from benchmarks.work import WORKS
from grpo_kernels import HeadLoRA

_RANK, _SCALING = 16, 2.0
_UPDATE = 0.02  # standard deviation of what the adapter adds to a logit


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line of the table."""

    name: str
    note: str
    work: str  # a name of WORKS
    base: str | None = None  # the variant whose time it is measured by
    metric_rows: str = "all"
    adapted: bool = False  # LoRA on the head

    def run(self, problem: Problem, lora: HeadLoRA | None) -> Result:
        """Compute loss and gradients; of an adapter its factors' in place of the weight's."""
        settings = {"metric_rows": self.metric_rows, "lora": lora}
        if lora is None:
            return run_loss(problem, settings)
        loss = policy_loss_of(problem, settings)
        dhidden, da, db = torch.autograd.grad(loss, (problem.hidden, lora.a, lora.b))
        return Result(loss=loss.detach(), dhidden=dhidden, dweight=_flat(da, db))


def _expected(problem: Problem, lora: HeadLoRA | None) -> tuple[Problem, Result]:
    """Return the problem of full weights, where the adapter is merged, and its exact results."""
    if lora is None:
        return problem, reference(problem)
    a, b = lora.a.detach(), lora.b.detach()
    weight = (problem.weight.detach().float() + lora.scaling * (b @ a)).requires_grad_()
    work = WORKS[problem.work.name.removesuffix("-frozen")]
    merged = replace(problem, case=replace(problem.case, work=work), weight=weight)
    exact = reference(merged)
    dweight = exact.dweight
    assert dweight is not None
    a, b = a.to(dweight), b.to(dweight)
    gradients = _flat(lora.scaling * (b.t() @ dweight), lora.scaling * (dweight @ a.t()))
    return merged, replace(exact, dweight=gradients)


def _flat(da: Tensor, db: Tensor) -> Tensor:
    return torch.cat([da.flatten(), db.flatten()])


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
    """Time ``rounds`` calls of every variant, in turns, on the head, tokens and dtype of ``case``.

    No round but the first begins after ``deadline``, by ``time.monotonic()``.
    """
    rows, calls = [], []
    for variant in VARIANTS:
        row = SavingsRow(variant.name, variant.note, base=variant.base)
        rows.append(row)
        # the inputs are the same for all variants
        problem = make_problem(replace(case, work=WORKS[variant.work]), device)
        lora = _adapter(problem) if variant.adapted else None
        try:
            _check(row, variant, problem, lora)
        except Exception as error:  # the other lines are still worth having
            row.failure = describe(error)
        if row.runs:
            calls.append((row, partial(variant.run, problem, lora)))
        free(device)
    timer = make_timer(device)
    for row, call in in_turns(calls, rounds, deadline):
        row.seconds.append(timer(call))
    facts = case.facts()
    del facts["work"], facts["softcap"]
    exact = str(reference_dtype(case, device)).removeprefix("torch.")
    return SavingsTable(**facts, reference=exact, rows=rows)


def _check(row: SavingsRow, variant: Variant, problem: Problem, lora: HeadLoRA | None) -> None:
    """Check a variant; also its warm-up."""
    merged, exact = _expected(problem, lora)
    found = compare(variant.run(problem, lora), exact, merged)
    row.errors, row.failure = found.errors, found.failure
