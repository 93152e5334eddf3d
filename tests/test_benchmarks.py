"""The benchmarks measure the right thing: every provider agrees, and a wrong one is found out."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import pytest
import torch

from benchmarks.check import (
    check_logprobs,
    check_loss,
    reference_dtype,
    reference_logprobs,
    reference_loss,
)
from benchmarks.measure import measure
from benchmarks.problem import CONFIG, Result, detached, make_problem
from benchmarks.providers import PROVIDERS
from benchmarks.record import record
from benchmarks.shapes import DTYPES, SHAPES
from benchmarks.table import markdown
from grpo_kernels import policy_loss

TINY = SHAPES["tiny"]
present = pytest.mark.parametrize("name", PROVIDERS)


def skip_if_absent(name: str) -> None:
    reason = PROVIDERS[name].absent()
    if reason is not None:
        pytest.skip(reason)


def wrong(result: Result) -> Result:
    return dataclasses.replace(result, dweight=result.dweight * 1.2)


def test_reference_is_autograd_in_fp64():
    problem = make_problem(TINY, torch.float32)
    exact = detached(problem, reference_dtype(problem))
    assert exact.hidden.dtype == torch.float64
    leaves = exact.hidden.requires_grad_(), exact.weight.requires_grad_()
    logits = exact.hidden @ exact.weight.t()
    logps = logits.log_softmax(-1).gather(-1, exact.target[..., None])[..., 0]
    loss, _ = policy_loss(logps.flatten(), problem.batch(), CONFIG)
    gradients = torch.autograd.grad(loss, leaves)
    reference = reference_loss(problem)
    torch.testing.assert_close(reference.loss, loss.detach())
    torch.testing.assert_close((reference.dhidden, reference.dweight), gradients)
    torch.testing.assert_close(reference_logprobs(problem), logps.detach())


def test_problem_clips_some_ratios():
    problem = make_problem(SHAPES["small"], torch.float32)
    delta = reference_logprobs(problem) - problem.old_logprobs
    outside = ((delta.exp() - 1).abs() > CONFIG.epsilon).double().mean()
    assert 0.05 < outside < 0.5


@present
@pytest.mark.parametrize("dtype", DTYPES)
def test_provider_agrees_with_the_reference(name, dtype):
    skip_if_absent(name)
    problem = make_problem(TINY, DTYPES[dtype])
    provider = PROVIDERS[name]
    if DTYPES[dtype] not in provider.dtypes:
        pytest.skip("not this dtype")
    check = check_loss(provider, problem, reference_loss(problem))
    assert check.passed, check.failure
    assert (check.dweight_error is None) == (name == "floor")
    if provider.logprobs is not None:
        check = check_logprobs(provider, problem, reference_logprobs(problem))
        assert check.passed, check.failure


def test_wrong_results_are_reported_in_place_of_a_time():
    right = PROVIDERS["ours"]
    broken = dataclasses.replace(right, name="broken", loss=lambda p: wrong(right.loss(p)))
    raising = dataclasses.replace(right, name="raising", loss=lambda p: 1 / 0)
    rows = measure([right, broken, raising], TINY, "fp32", "loss", rounds=1, memory=False)
    assert rows[0].median is not None and rows[0].check.passed
    assert rows[1].median is None and "dweight_error 2.0e-01" in rows[1].check.failure
    assert rows[2].median is None and "ZeroDivisionError" in rows[2].check.failure
    text = markdown(record(rows, TINY, "fp32", "loss"))
    assert "| broken | FAILED: dweight_error 2.0e-01" in text


def test_nan_fails():
    right = PROVIDERS["ours"]

    def poisoned(problem):
        result = right.loss(problem)
        result.dhidden[0, 0, 0] = float("nan")
        return result

    problem = make_problem(TINY, torch.float32)
    check = check_loss(dataclasses.replace(right, loss=poisoned), problem, reference_loss(problem))
    assert not check.passed


def test_absent_package_is_reported(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    rows = measure([PROVIDERS["liger"]], TINY, "fp32", "loss", rounds=1, memory=False)
    assert rows[0].absent == "liger-kernel is not installed" and rows[0].median is None
    monkeypatch.undo()
    text = markdown(record(rows, TINY, "fp32", "loss"))
    assert "| liger | absent: liger-kernel is not installed" in text
