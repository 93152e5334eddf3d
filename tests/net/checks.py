"""What every case is held to: the oracle's values and gradients, and no change by what must not."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.testing import poisoned_allocations
from tests.net.cases import Case
from tests.net.judge import OF_BOUNDED, Judge
from tests.net.problem import Problem, make_problem
from tests.net.product import autocast, of_rows, run
from tests.net.results import Found, assert_same_bits, bits


def check(case: Case) -> None:
    """Raise AssertionError unless the product does with a case what it promises."""
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        problem = make_problem(case)
        # a mode that dynamo refuses
        poisoned = nullcontext if case.twist == "compile" else poisoned_allocations
        with poisoned():
            got = _accepted(case, problem)
        if got is not None:
            Judge(case, problem).judge(got)
            with poisoned():
                TWISTS[case.twist](case, problem, got)
    finally:
        torch.set_num_threads(threads)


def _accepted(case: Case, problem: Problem) -> Found | None:
    """Run a case; None where the documents refuse it, and the product does so by name."""
    must, may = refusals(case, problem)
    try:
        got = run(case, problem)
    except ValueError as error:
        if str(error).split(":")[0] not in must | may:
            raise
        return None
    except RuntimeError as error:  # of a library whose GEMM does not keep a row's bits
        if not (case.batch_invariant and str(error).startswith("batch_invariant:")):
            raise
        return None
    assert not must, f"{', '.join(must)}: expected to be refused"
    return got


def refusals(case: Case, problem: Problem) -> tuple[set[str], set[str]]:
    """Return the arguments that must be refused in a case, and those that may."""
    must, may = set(), set()
    settings = case.settings
    if case.backend == "reference" and case.batch_invariant:
        must.add("batch_invariant")
    if case.of_loss and case.schedule == "one_pass" and case.entry != "composed":
        if settings.get("top_entropy_quantile", 1) < 1 or case.backend == "reference":
            must.add("schedule")
        # a sequence longer than a tile, a row's bits, sums that need every rank's forward
        elif case.tile_rows is not None or case.batch_invariant or case.ranks > 1:
            may.add("schedule")
    values = problem.fields.values()
    if case.of_loss and any(bool(x.flatten()[problem.keep].isinf().any()) for x in values):
        may |= {"old_logprobs", "ref_logprobs", "rollout_logprobs"}
    return (must, may | must) if len(must) < 2 else (set(), must | may)


def _again(case: Case, problem: Problem, got: Found) -> None:
    assert_same_bits(got, run(case, problem))


def _garbage(case: Case, problem: Problem, got: Found) -> None:
    """Rows without a loss may hold anything."""
    if case.tied:
        return
    off = ~problem.keep.reshape(problem.target.shape)
    hidden = problem.leaves["hidden"].clone(memory_format=torch.preserve_format)
    hidden[off] = torch.nan
    fields = {
        name: x.masked_fill(off, 7.0 if name == "rollout_weights" else torch.inf)
        for name, x in problem.fields.items()
    }
    target = problem.target.masked_fill(off, 0 if case.of_loss else 1 << 40)
    leaves = problem.leaves | {"hidden": _like(hidden, problem.leaves["hidden"])}
    teacher = dict(problem.teacher)
    if "hidden" in teacher:
        teacher["hidden"] = teacher["hidden"].masked_fill(off[:, None], torch.nan)
    changed = replace(problem, leaves=leaves, fields=fields, target=target, teacher=teacher)
    assert_same_bits(got, run(case, changed))


def _like(x: Tensor, other: Tensor) -> Tensor:
    return torch.empty_strided(other.shape, other.stride(), dtype=other.dtype).copy_(x)


def _split(case: Case, problem: Problem, got: Found) -> None:
    """In the batch-invariant mode a row's bits are its own; the loss's are those of its parts."""
    if not case.batch_invariant:
        return
    if case.of_loss:
        return
    posed, count = problem.posed((), device=case.device), problem.target.shape[0]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(case.seed))
    place = problem.keep.cumsum(0) - 1
    for rows in (torch.arange(count // 3), order[: (count + 1) // 2], order[:1]):
        with autocast(case):
            part = of_rows(case, posed, rows.to(case.device))[0]
        kept = place[rows[problem.keep[rows]]]
        for name in part.keys() - {"loss"}:
            if name == "mean_logit" and case.device != "cpu":
                continue  # torch's sums of fp64 depend on how many there are
            value = part[name].detach().cpu()
            assert torch.equal(bits(value), bits(got.values[name][kept])), f"{name}: other bits"


def _no_grad(case: Case, problem: Problem, got: Found) -> None:
    """Values do not depend on whether gradients are wanted."""
    frozen = replace(case, trained="nothing", main_grad=False, schedule="auto")
    with torch.no_grad():
        found = run(frozen, problem)
    if case.batch_invariant:
        for name, value in got.values.items():
            if name in OF_BOUNDED:
                continue
            assert torch.equal(bits(found.values[name]), bits(value)), f"{name}: other bits"
    else:
        Judge(frozen, problem).judge(Found(found.values, {}))


def _compile(case: Case, problem: Problem, got: Found) -> None:
    """Compare; the compiler multiplies gradients itself, which rounds them once more."""
    torch._dynamo.reset()
    compiled = run(replace(case, compiled=True), problem)
    assert_same_bits(Found(got.values, {}), Found(compiled.values, {}))
    Judge(case, problem).judge(compiled)


def _nothing(case: Case, problem: Problem, got: Found) -> None:
    """Do nothing: the second run, if there is one, is in :func:`run`."""


TWISTS = {
    "none": _nothing,
    "again": _again,
    "second_backward": _nothing,
    "garbage_in_masked_rows": _garbage,
    "split": _split,
    "checkpoint": _nothing,
    "offload": _nothing,
    "no_grad": _no_grad,
    "compile": _compile,
}
