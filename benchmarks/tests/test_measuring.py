"""The benchmarks measure the right thing: one problem for all, and a wrong result is found out."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.check import compare, reference, reference_dtype, same_bits, same_rows
from benchmarks.environment import ROOT
from benchmarks.measure import Settings, in_turns, measure
from benchmarks.problem import Result, detached, make_problem
from benchmarks.providers import PROVIDERS
from benchmarks.shapes import MODELS, Case
from benchmarks.suites import SUITES
from benchmarks.work import WORKS
from grpo_kernels import policy_loss

SOFTCAPPED = dataclasses.replace(MODELS["tiny"], softcap=5.0)
QUICKLY = Settings(rounds=1)


def case(work: str = "dapo", dtype: str = "fp32", model=MODELS["tiny"]) -> Case:
    return Case(model, 32, dtype, WORKS[work])


def broken(name: str, run) -> object:
    return dataclasses.replace(PROVIDERS["ours"], name=name, run=run)


def wrong(problem) -> Result:
    result = PROVIDERS["ours"].run(problem)
    return dataclasses.replace(result, dweight=result.dweight * 1.2)


@pytest.mark.parametrize("model", [MODELS["tiny"], SOFTCAPPED], ids=["linear", "softcap"])
@pytest.mark.parametrize("work", ["dapo-kl", "gspo-masked", "logprobs-grad", "nll"])
def test_reference_is_autograd_in_fp64(work, model):
    problem = make_problem(case(work, model=model))
    assert reference_dtype(problem.case, "cpu") == torch.float64
    exact = detached(problem, torch.float64)
    leaves = exact.hidden.requires_grad_(), exact.weight.requires_grad_()
    logits = exact.hidden @ exact.weight.t()
    if model.softcap:
        logits = model.softcap * torch.tanh(logits / model.softcap)
    logps = logits.log_softmax(-1).gather(-1, exact.target[..., None])[..., 0]
    if work == "logprobs-grad":
        root = (logps * problem.dlogprobs).sum()
    elif work == "nll":
        root = -logps.mean()
    else:
        root, _ = policy_loss(logps[problem.mask], problem.batch(), problem.loss)
    gradients = torch.autograd.grad(root, leaves)
    result = reference(problem)
    torch.testing.assert_close((result.dhidden, result.dweight), gradients)
    torch.testing.assert_close(result.logprobs, logps.detach())
    if work != "logprobs-grad":
        torch.testing.assert_close(result.loss, root.detach())


def test_problem_is_peaked_and_clips_some_ratios():
    problem = make_problem(Case(MODELS["small"], 256, "fp32", WORKS["dapo"]))
    logprobs = reference(problem).logprobs
    outside = ((logprobs - problem.old_logprobs).exp() - 1).abs() > problem.loss.surrogate.epsilon
    assert 0.2 < outside.double().mean() < 0.6
    assert logprobs.exp().min() < 0.01 and logprobs.exp().max() > 0.99


def test_half_of_the_tokens_matter():
    masked, zero = (make_problem(case(f"dapo-{rows}")) for rows in ("masked", "zero"))
    assert masked.mask.sum() == 16 and masked.half().mask.sum() == 8
    assert (zero.advantages == 0).sum() == 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("name", [name for name in PROVIDERS if name.startswith(("ours", "eager"))])
def test_ours_agree_with_the_reference(name, work, dtype):
    provider, problem = PROVIDERS[name], make_problem(case(work, dtype))
    if (reason := provider.absent("cpu") or provider.unable(problem.case)) is not None:
        pytest.skip(reason)
    result = provider.run(problem)
    check = compare(result, reference(problem), problem)
    assert check.passed, check.failure
    assert set(check.errors) == set(problem.work.outputs)
    if name.startswith("ours"):
        assert same_bits(result, provider.run(problem), problem)


def test_bare_gemms_compute_only_what_matters():
    for work, gemms in (("logprobs", 1), ("dapo-frozen", 2), ("dapo", 3)):
        result = PROVIDERS["bare-gemms"].run(make_problem(case(work)))
        assert len(list(result.tensors())) == gemms - 1


def test_wrong_results_are_reported_in_place_of_a_time():
    providers = [
        PROVIDERS["ours"],
        broken("wrong", wrong),
        broken("raising", lambda problem: 1 / 0),
        broken("silent", lambda problem: Result(loss=torch.zeros(()))),
    ]
    right, *others = measure(case(), providers, QUICKLY)
    assert len(right.seconds) == 1 and right.failure is None
    assert right.repeatable is True and right.batch_invariant is True
    assert not any(row.seconds for row in others)
    assert "dweight 2.0e-01" in others[0].failure
    assert "ZeroDivisionError" in others[1].failure
    assert "no dhidden" in others[2].failure


def test_nan_fails():
    problem = make_problem(case())
    result = PROVIDERS["ours"].run(problem)
    result.dhidden[0, 0, 0] = float("nan")
    assert not compare(result, reference(problem), problem).passed


def test_changing_bits_are_noticed():
    problem = make_problem(case())
    result = PROVIDERS["ours"].run(problem)
    other = dataclasses.replace(result, loss=result.loss + 1e-6)
    assert same_bits(result, result, problem) and not same_bits(result, other, problem)
    half = problem.half()
    part = PROVIDERS["ours"].run(half)
    assert same_rows(part, result, half)
    part.dhidden[0, 0, 0] *= 1 + 1e-6
    assert not same_rows(part, result, half)


def test_absent_package_is_reported(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    provider = dataclasses.replace(PROVIDERS["ours"], package="some-kernel")
    monkeypatch.setattr(importlib.metadata, "version", missing)
    (row,) = measure(case(), [provider], QUICKLY)
    assert row.absent == "some-kernel is not installed" and not row.seconds


def test_time_that_is_up_is_reported():
    (row,) = measure(case(), [PROVIDERS["ours"]], Settings(deadline=0.0))
    assert row.absent == "not reached: the time was up" and not row.seconds


def test_memory_is_that_of_a_fresh_process():
    big = Case(MODELS["small"], 256, "fp32", WORKS["dapo"])
    (row,) = measure(big, [PROVIDERS["eager"]], Settings(rounds=1, memory=True))
    logits, weight = 256 * 32000 * 4, 32000 * 256 * 4
    assert row.memory.returned == weight + 256 * 256 * 4 + 4  # and the loss
    assert logits < row.memory.extra < 6 * logits


def test_every_other_round_runs_backwards() -> None:
    calls = [("a", 1), ("b", 2)]
    taken = "".join(name for name, _ in in_turns(calls, 3, float("inf")))
    assert taken == "abbaab"
    assert len(list(in_turns(calls, 3, deadline=0.0))) == 2
    assert len(list(in_turns(calls, 3, float("inf"), enough=lambda index: index == 2))) == 4


def test_the_schedule_that_ran_is_kept() -> None:
    """And that which ours takes anyway is not measured twice."""
    names = ("ours", "ours-one-pass", "ours-two-pass", "eager")
    rows = measure(case(), [PROVIDERS[name] for name in names], QUICKLY)
    assert [row.schedule for row in rows] == ["one_pass", None, "two_pass", None]
    assert rows[1].unable == "the same as ours: it is what ours chooses" and not rows[1].seconds


def test_suites_have_no_case_twice():
    for suite in SUITES.values():
        names = [str(entry) for entry in suite()]
        assert len(names) == len(set(names)) > 0


def test_samples_are_replayed(tmp_path):
    """In a process of its own: beside other workers pytest-benchmark measures nothing."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "from benchmarks.replay import clock, replay\n\n"
        "@pytest.mark.benchmark(timer=clock)\n"
        "def test_it(benchmark):\n"
        "    replay(benchmark, [0.25, 0.5, 1.0])\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", str(tmp_path), "--benchmark-json", "out.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    (data,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert data["stats"]["data"] == [0.25, 0.5, 1.0]
