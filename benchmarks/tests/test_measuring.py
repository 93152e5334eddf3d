"""The benchmarks measure the right thing: one problem for all, and a wrong result is found out."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math

import psutil
import pytest
import torch

from benchmarks import child
from benchmarks.check import compare, reference, reference_dtype, same_bits, same_rows
from benchmarks.measure import Settings, measure
from benchmarks.problem import Result, detached, make_problem
from benchmarks.providers import EVERY, PROVIDERS
from benchmarks.providers.base import Provider
from benchmarks.results import Row
from benchmarks.shapes import DECIDED, DTYPES, MODELS, SPREADS, Case, Model
from benchmarks.test_accuracy import BANDS, measure_accuracy
from benchmarks.timing import in_turns
from benchmarks.work import WORKS
from grpo_kernels import policy_loss

TINY, SMALL = MODELS["tiny"], MODELS["small"]
SOFTCAPPED = dataclasses.replace(TINY, softcap=5.0)
QUICKLY = Settings(rounds=1)


def case(work="dapo", dtype="fp32", model=TINY, tokens=32, inputs="peaked", **thoroughly) -> Case:
    return Case(model, tokens, dtype, WORKS[work], inputs, **thoroughly)


def measured(*providers: Provider, settings: Settings = QUICKLY, **options) -> list[Row]:
    return measure([(provider, case(**options)) for provider in providers], settings)


def changed(run, **changes) -> Provider:
    return dataclasses.replace(PROVIDERS["ours"], run=run, **changes)


@pytest.mark.parametrize("model", [TINY, SOFTCAPPED], ids=["linear", "softcap"])
@pytest.mark.parametrize("work", ["dapo-kl", "gspo-masked", "logprobs-grad", "nll"])
def test_reference_is_autograd_in_fp64(work: str, model: Model) -> None:
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


def test_problem_is_peaked_and_clips_some_ratios() -> None:
    problem = make_problem(case(model=SMALL, tokens=256))
    logprobs = reference(problem).logprobs
    outside = ((logprobs - problem.old_logprobs).exp() - 1).abs() > problem.loss.surrogate.epsilon
    assert 0.2 < outside.double().mean() < 0.6
    assert logprobs.exp().min() < 0.01 and logprobs.exp().max() > 0.99
    masked, zero = (make_problem(case(f"dapo-{rows}")) for rows in ("masked", "zero"))
    assert masked.mask.sum() == 16 and masked.half().mask.sum() == 8
    assert (zero.advantages == 0).sum() == 2


@pytest.mark.parametrize("inputs", SPREADS)
def test_inputs_are_as_peaked_as_they_are_called(inputs: str) -> None:
    """At the small head; targets are drawn from the distributions, but for the raised ones."""
    problem = make_problem(case("logprobs-entropy", model=SMALL, tokens=256, inputs=inputs))
    exact = reference(problem)
    low, high = {"policy-like": (0.2, 0.9), "text-like": (1.5, 3.5), DECIDED: (0.3, 1.2)}.get(
        inputs, (4.0, 9.0)
    )
    assert low < exact.entropy.mean() < high
    logits = problem.hidden.detach().flatten(0, 1) @ problem.weight.detach().t()
    subnormal = logits.softmax(-1) < torch.finfo(torch.float32).tiny
    assert inputs == DECIDED or subnormal.double().mean() < 1e-3
    if inputs != "peaked":
        expected = -exact.entropy.mean().item()
        assert exact.logprobs.mean().item() == pytest.approx(expected, abs=0.3)
    again = make_problem(problem.case)
    assert torch.equal(problem.hidden, again.hidden) and torch.equal(problem.target, again.target)


def test_wrong_results_are_reported_in_place_of_a_time() -> None:
    def wrong(problem) -> Result:
        result = PROVIDERS["ours"].run(problem)
        return dataclasses.replace(result, dweight=result.dweight * 1.2)

    right, *others = measured(
        PROVIDERS["ours"],
        changed(wrong),
        changed(lambda problem: 1 / 0),
        changed(lambda problem: Result(loss=torch.zeros(()))),
    )
    assert len(right.seconds) == 1 and right.runs
    assert right.info["repeatable"] is True and right.info["batch_invariant"] is True
    assert all(row.state == "wrong" and not row.seconds for row in others)
    said = " ".join(row.reason for row in others)
    assert all(x in said for x in ("dweight 2.0e-01", "ZeroDivisionError", "no dhidden"))


def test_nan_fails() -> None:
    problem = make_problem(case())
    result = PROVIDERS["ours"].run(problem)
    result.dhidden[0, 0, 0] = float("nan")
    assert "dhidden nan" in compare(result, reference(problem), problem)[1]


def test_changing_bits_are_noticed() -> None:
    problem = make_problem(case())
    result = PROVIDERS["ours"].run(problem)
    other = dataclasses.replace(result, loss=result.loss + 1e-6)
    assert same_bits(result, result, problem) and not same_bits(result, other, problem)
    half = problem.half()
    part = PROVIDERS["ours"].run(half)
    assert same_rows(part, result, half)
    part.dhidden[0, 0, 0] *= 1 + 1e-6
    assert not same_rows(part, result, half)


def test_who_is_not_measured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    assert measured(PROVIDERS["ours"], settings=Settings(deadline=0.0))[0].reason == (
        "not reached: the time was up"
    )
    names = ("ours", "ours-one-pass", "ours-two-pass", "eager")
    rows = measured(*map(PROVIDERS.__getitem__, names))
    assert [row.info.get("schedule") for row in rows] == ["one_pass", None, "two_pass", None]
    assert (rows[1].state, rows[1].seconds) == ("unable", [])
    assert rows[1].reason == "the same as ours: it is what ours chooses"
    slow = dataclasses.replace(PROVIDERS["ours"], slow_start=True)
    (row,) = measured(slow)
    assert (row.state, row.reason) == ("absent", "starts slowly: not in this case")
    monkeypatch.setattr(importlib.metadata, "version", missing)
    (row,) = measured(dataclasses.replace(PROVIDERS["ours"], packages=("some-kernel",)))
    assert (row.state, row.reason) == ("absent", "needs some-kernel")


def test_memory_is_that_of_a_fresh_process() -> None:
    (row,) = measured(PROVIDERS["eager"], model=SMALL, tokens=256, memory=True)
    logits, weight = 256 * 32000 * 4, 32000 * 256 * 4
    assert row.info["returned_bytes"] == weight + 256 * 256 * 4 + 4  # and the loss
    assert logits < row.info["extra_bytes"] < 6 * logits


def test_every_other_round_runs_backwards() -> None:
    calls = [("a", 1), ("b", 2)]
    assert "".join(name for name, _ in in_turns(calls, 3)) == "abbaab"
    assert len(list(in_turns(calls, 3, deadline=0.0))) == 2
    assert len(list(in_turns(calls, 3, enough=lambda index: index == 2))) == 4


def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch) -> None:
    started, hang = tmp_path / "started", tmp_path / "hang"
    hang.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {started}\nwait\n")
    hang.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(hang))
    communicate = child.subprocess.Popen.communicate

    def once_started(self, given, timeout):
        while not started.exists() or not started.read_text().strip():
            pass
        return communicate(self, given, timeout=0.01)

    monkeypatch.setattr(child.subprocess.Popen, "communicate", once_started)
    with pytest.raises(child.ChildError, match="did not finish in 3 s"):
        child.ask(print, timeout=3.0)
    found = [x for x in psutil.process_iter() if x.pid == int(started.read_text())]
    assert all(x.status() == psutil.STATUS_ZOMBIE for x in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("work", ["logprobs-entropy", "dapo"])
def test_ours_is_as_exact_as_eager_in_fp32(work: str, dtype: str) -> None:
    """At most twice its error in each band; and far below those who round logits."""
    names = ("ours", "ours-two-pass", "eager-fp32", "eager", "trl")
    if work == "logprobs-entropy":
        names = ("ours", "ours-chunked", "eager-fp32", "eager", "trl")
    found = {
        row.provider: row
        for row in measure_accuracy(
            case(work, dtype, SMALL, 128, DECIDED), [EVERY[name] for name in names], QUICKLY
        )
    }
    exact = found["eager-fp32" if dtype == "bf16" else "eager"]
    for ours in (found[name] for name in names[:2]):
        for name, error in ours.errors.items():
            assert error <= max(2 * exact.errors[name], 5e-7), name
        for name, (middle, largest) in exact.info.items():
            assert ours.info[name][0] <= 2 * middle and ours.info[name][1] <= 2 * largest, name
    decided = next(iter(BANDS))
    if dtype == "bf16" and work == "dapo":
        assert found["ours"].info[f"rows of dhidden, {decided}"][1] < 2**-6
        assert found["eager"].info[f"rows of dhidden, {decided}"][1] > 2**-6
    elif dtype == "bf16":
        assert found["ours"].info["ratio noise"][0] < 1e-4 < found["eager"].info["ratio noise"][0]


def test_what_goes_wrong_with_values_is_said() -> None:
    def shifted(problem) -> Result:
        result = PROVIDERS["eager"].run(problem)
        return dataclasses.replace(result, logprobs=result.logprobs + 1)

    def not_a_number(problem) -> Result:
        result = PROVIDERS["eager"].run(problem)
        result.entropy[0, 0] = math.nan
        return result

    wrong = {
        "32 values are off, one by 1.0e+00; allowed 0.5": shifted,
        "1 values are off, one by nan; allowed 0.5": not_a_number,
        "AssertionError: no logprobs": lambda problem: Result(),
    }
    for reason, run in wrong.items():
        (row,) = measure_accuracy(case("logprobs-entropy"), [changed(run)], QUICKLY)
        assert (row.state, row.reason, row.info) == ("wrong", reason, {})
