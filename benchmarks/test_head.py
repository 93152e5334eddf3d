"""The suite: ``python -m pytest benchmarks --benchmark-only [--full]``."""

from __future__ import annotations

import functools

import pytest

from benchmarks.check import check_logprobs, check_loss, reference_logprobs, reference_loss
from benchmarks.measure import WORKS
from benchmarks.problem import make_problem
from benchmarks.providers import PROVIDERS
from benchmarks.shapes import DTYPES, SHAPES


@functools.lru_cache(maxsize=1)
def problem_and_references(shape_name: str, dtype: str):
    problem = make_problem(SHAPES[shape_name], DTYPES[dtype])
    return problem, reference_loss(problem), reference_logprobs(problem)


@pytest.mark.parametrize("dtype", DTYPES, scope="module")
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("name", PROVIDERS)
def test_head(benchmark, shape_name: str, dtype: str, work: str, name: str) -> None:
    provider = PROVIDERS[name]
    call = getattr(provider, work)
    if call is None or DTYPES[dtype] not in provider.dtypes:
        pytest.skip(f"{name} has no {work} in {dtype}")
    if (reason := provider.absent()) is not None:
        pytest.skip(reason)
    problem, loss, logprobs = problem_and_references(shape_name, dtype)
    if work == "loss":
        check = check_loss(provider, problem, loss)
    else:
        check = check_logprobs(provider, problem, logprobs)
    assert check.passed, check.failure
    benchmark.group = f"{shape_name}, {dtype}, {work}"
    benchmark.pedantic(call, args=(problem,), rounds=3, warmup_rounds=0)
