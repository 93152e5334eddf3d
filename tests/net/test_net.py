"""Some two thousand generated cases; ``python -m tests.fuzz`` has more.

They are the same in every run, except a few: Hypothesis also draws constants from loaded modules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels import available_backends
from tests.fuzz import ON_CPUS, ON_GPUS, WITHOUT_REFERENCE, Coverage, find
from tests.net.cases import Case, cases
from tests.net.problem import make_problem
from tests.net.product import run


def assert_none_fails(number: int, count: int, *of: Any, **kind: Any) -> None:
    failure = find(number, count, cases(*of, **kind), Coverage())
    assert not failure, failure


@pytest.mark.parametrize("number", range(6))
def test_generated_cases(number: int) -> None:
    assert_none_fails(number, 170, ON_CPUS)


@pytest.mark.long
@pytest.mark.parametrize("number", range(6, 12))
def test_more_generated_cases(number: int) -> None:
    assert_none_fails(number, 170, ON_CPUS)


@pytest.mark.parametrize("number", range(4))
def test_cases_on_two_ranks(number: int) -> None:
    assert_none_fails(number, 40, WITHOUT_REFERENCE, ranks=2)


@pytest.mark.parametrize("ranked", [("is_top1",), ("is_top1", "topk_indices")])
def test_ties_between_ranks(ranked: tuple[str, ...]) -> None:
    """Which the judge leaves open: of equal scores the first counts, on whatever rank."""
    case = Case(
        outputs=("logprobs", *ranked),
        packed=True,
        lengths=(40,),
        vocab=8,
        trained="hidden",
        ranks=2,
    )
    problem = make_problem(case)
    problem.leaves["weight"][4:] = problem.leaves["weight"][:4]
    split, whole = run(case, problem), run(replace(case, ranks=1), problem)
    for name in ranked:
        assert torch.equal(split.values[name], whole.values[name]), name


@pytest.mark.long
@pytest.mark.parametrize("number", range(3))
def test_cases_compiled(number: int) -> None:
    assert_none_fails(number, 12, WITHOUT_REFERENCE, compiled=True)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(2))
def test_cases_on_a_gpu(number: int) -> None:
    assert_none_fails(number, 60, ON_GPUS, device="cuda")


@pytest.mark.skipif("triton" not in available_backends(), reason="no Triton on this machine")
@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_cases_in_triton(number: int) -> None:
    assert_none_fails(number, 8, ("triton",))
