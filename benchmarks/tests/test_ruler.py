"""The measurement is right: all providers get one problem, and wrong results are found."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch

from benchmarks import child
from benchmarks.check import compare, reference, same_bits, same_rows
from benchmarks.measure import Settings, measure
from benchmarks.problem import Result, make_problem
from benchmarks.providers import EVERY, PROVIDERS
from benchmarks.providers.base import Provider
from benchmarks.results import Row
from benchmarks.shapes import DECIDED, DTYPES, MODELS, SPREADS, WORKS, Case
from benchmarks.test_accuracy import BANDS, measure_accuracy
from benchmarks.timing import in_turns

TINY, SMALL = MODELS["tiny"], MODELS["small"]
SOFTCAPPED = replace(TINY, softcap=5.0)
QUICKLY = Settings(rounds=1)
OURS = PROVIDERS["ours"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(work="dapo", dtype="fp32", model=TINY, tokens=32, inputs="peaked", **thoroughly) -> Case:
    return Case(model, tokens, dtype, WORKS[work], inputs, **thoroughly)


def measured(*providers: Provider, **options) -> list[Row]:
    calls = [(provider, case(**options), Row(provider.name)) for provider in providers]
    measure(calls, QUICKLY)
    return [row for _, _, row in calls]


def failure(provider: Provider, case: Case, device: str = "cpu") -> str | None:
    if provider.unable(case) is not None:
        return None
    problem = make_problem(case, device)
    result = provider.run(problem)
    return compare(result, reference(problem), problem)[1] if provider.checked else None


@pytest.mark.parametrize("model", [TINY, SOFTCAPPED], ids=["linear", "softcap"])
@pytest.mark.parametrize("work", ["dapo-kl", "gspo-masked", "logprobs-grad", "nll"])
def test_reference_is_autograd_of_full_logits_in_fp64(work, model, monkeypatch):
    problem = make_problem(case(work, model=model))
    found = reference(problem)
    assert found.dhidden.dtype == torch.float64

    def of_full_logits(hidden, target, weight, softcap):
        logits = hidden @ weight.t()
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        logps = logits.log_softmax(-1)
        return logps.gather(-1, target[:, None])[:, 0], -(logps.exp() * logps).sum(-1)

    monkeypatch.setattr("benchmarks.check.statistics", of_full_logits)
    torch.testing.assert_close(vars(found), vars(reference(problem)))


@pytest.mark.parametrize("inputs", SPREADS)
def test_inputs_are_as_peaked_as_they_are_called(inputs):
    """At the small head; targets are sampled from the distributions, except raised targets."""
    problem = make_problem(case("logprobs-entropy", model=SMALL, tokens=256, inputs=inputs))
    exact = reference(problem)
    spans = {"policy-like": (0.2, 0.9), "text-like": (1.5, 3.5), DECIDED: (0.3, 1.2)}
    low, high = spans.get(inputs, (4.0, 9.0))
    assert low < exact.entropy.mean() < high
    logits = problem.hidden.detach().flatten(0, 1) @ problem.weight.detach().t()
    subnormal = logits.softmax(-1) < torch.finfo(torch.float32).tiny
    assert inputs == DECIDED or subnormal.double().mean() < 1e-3
    if inputs != "peaked":
        expected = -exact.entropy.mean().item()
        assert exact.logprobs.mean().item() == pytest.approx(expected, abs=0.3)
    again = make_problem(problem.case)
    assert torch.equal(problem.hidden, again.hidden) and torch.equal(problem.target, again.target)


def test_problem_is_peaked_clips_some_ratios_and_leaves_rows_out():
    problem = make_problem(case(model=SMALL, tokens=256))
    logprobs = reference(problem).logprobs
    outside = ((logprobs - problem.old_logprobs).exp() - 1).abs() > problem.loss.surrogate.epsilon
    assert 0.2 < outside.double().mean() < 0.6
    assert logprobs.exp().min() < 0.01 and logprobs.exp().max() > 0.99
    masked, zero = (make_problem(case(f"dapo-{rows}")) for rows in ("masked", "zero"))
    assert masked.mask.sum() == 16 and masked.half().mask.sum() == 8
    assert (zero.advantages == 0).sum() == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROVIDERS)
def test_a_present_peer_agrees_with_the_reference(name, dtype):
    """In every work, or a few if compiling is slow; a softcap is applied or not applicable."""
    provider = PROVIDERS[name]
    if reason := provider.absent(DEVICE) or (provider.timeout and "may hang"):
        pytest.skip(reason)
    works = ("nll", "dapo") if provider.slow_start else WORKS
    cases = [case(work, dtype) for work in works]
    if dtype == "fp32":
        capped = ("dapo",) if provider.slow_start else ("logprobs", "logprobs-grad", "nll", "dapo")
        cases += [case(work, model=SOFTCAPPED) for work in capped]
    assert {each: x for each in cases if (x := failure(provider, each, DEVICE))} == {}


@pytest.mark.parametrize("name", ["liger-triton", "liger-sm90"])
def test_ligers_kernels_for_gpus_on_what_stands_for_them(name, monkeypatch):
    """In Triton's interpreter, and with torch code in place of Hopper kernels."""
    if name == "liger-triton" and DEVICE == "cuda":
        pytest.skip("the interpreter is off")
    ops = pytest.importorskip("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    hopper = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    stand_in = ModuleType(hopper)
    function = ops.LigerFusedLinearScaledCrossEntropyFunction
    stand_in.LigerFusedScaledCrossEntropySM90Function = function
    monkeypatch.setitem(sys.modules, hopper, stand_in)
    for work in ("logprobs-entropy", "logprobs-grad", "nll", "dapo-kl", "gspo-masked"):
        assert failure(PROVIDERS[name], case(work, "bf16")) is None, work


def test_wrong_results_are_reported_in_place_of_a_time():
    def wrong(problem):
        result = OURS.run(problem)
        return replace(result, dweight=result.dweight * 1.2)

    broken = {
        "dweight 2.0e-01": wrong,
        "ZeroDivisionError": lambda problem: 1 / 0,
        "no dhidden": lambda problem: Result(loss=torch.zeros(())),
        "loss nan": lambda problem: replace(OURS.run(problem), loss=torch.tensor(math.nan)),
    }
    right, *others = measured(OURS, *(replace(OURS, run=run) for run in broken.values()))
    assert len(right.seconds) == 1 and right.runs
    assert right.info["repeatable"] is True and right.info["batch_invariant"] is True
    for row, reason in zip(others, broken, strict=True):
        assert row.state == "wrong" and not row.seconds and reason in row.reason


def test_changing_bits_are_noticed():
    problem = make_problem(case())
    half, result = problem.half(), OURS.run(problem)
    other = replace(result, loss=result.loss + 1e-6)
    assert same_bits(result, result, problem) and not same_bits(result, other, problem)
    part = OURS.run(half)
    assert same_rows(part, result, half)
    part.dhidden[0, 0, 0] *= 1 + 1e-6
    assert not same_rows(part, result, half)


def test_who_is_not_measured_says_why(monkeypatch):
    one, two = measured(PROVIDERS["ours-one-pass"], PROVIDERS["ours-two-pass"])
    assert (one.state, one.seconds, two.info["schedule"]) == ("unable", [], "two_pass")
    assert one.reason == "the same as ours, which chooses it"
    slow, lacking = measured(
        replace(OURS, slow_start=True), replace(OURS, packages=("some-kernel",))
    )
    assert (slow.state, slow.reason) == ("absent", "starts slowly: not in this case")
    assert (lacking.state, lacking.reason) == ("absent", "needs some-kernel")
    for name in ("liger-triton", "liger-sm90", "cce", "cce-exact", "quack"):
        assert PROVIDERS[name].absent("cpu") == "needs a GPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    said = PROVIDERS["quack"].absent("cuda")
    assert said == "needs a GPU of compute capability 9.0 or more, this is 8.0"
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    assert PROVIDERS["torch-lce"].absent("cpu").startswith(f"torch {torch.__version__} has no")


def test_memory_is_that_of_a_fresh_process():
    (row,) = measured(PROVIDERS["eager"], model=SMALL, tokens=256, memory=True)
    logits, weight = 256 * 32000 * 4, 32000 * 256 * 4
    assert row.info["returned_bytes"] == weight + 256 * 256 * 4 + 4  # and the loss
    assert logits < row.info["extra_bytes"] < 6 * logits


def test_every_other_round_runs_backwards():
    calls = [("a", 1), ("b", 2)]
    assert "".join(name for name, _ in in_turns(calls, 3)) == "abbaab"
    assert len(list(in_turns(calls, 5, budget=0.0))) == 2 * 3


def hang(path: str) -> None:
    started = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(str(started.pid))
    started.wait()


def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch):
    """No other call shares it."""
    monkeypatch.setattr(child, "_shared", {})
    assert child.ask(abs, -1) == 1  # it has started now
    [shared] = child._shared.values()
    started = tmp_path / "started"
    with pytest.raises(child.ChildError, match="has not ended in time"):
        child.ask(hang, str(started), timeout=2.0)
    assert child._shared == {} and all(x.poll() is not None for x in shared._processes)
    found = [x for x in psutil.process_iter() if x.pid == int(started.read_text())]
    assert all(x.status() == psutil.STATUS_ZOMBIE for x in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("work", ["logprobs-entropy", "dapo"])
def test_ours_is_as_exact_as_eager_in_fp32(work, dtype):
    """At most twice its error in each band, and far below providers that round logits."""
    own = ("ours", "ours-chunked" if work == "logprobs-entropy" else "ours-two-pass")
    found = {name: Row(name) for name in (*own, "eager-fp32", "eager")}
    runs = [(EVERY[name], row) for name, row in found.items()]
    measure_accuracy(case(work, dtype, SMALL, 128, DECIDED), runs, QUICKLY)
    exact = found["eager-fp32" if dtype == "bf16" else "eager"]
    for name in own:
        for output, error in found[name].errors.items():
            assert error <= max(2 * exact.errors[output], 5e-7), output
        for output, (middle, largest) in exact.info.items():
            ours = found[name].info[output]
            assert ours[0] <= 2 * middle and ours[1] <= 2 * largest, output
    if dtype == "bf16":
        name, index, bound = ("ratio noise", 0, 1e-4)
        if work == "dapo":
            name, index, bound = (f"rows of dhidden, {next(iter(BANDS))}", 1, 2**-6)
        assert found["ours"].info[name][index] < bound < found["eager"].info[name][index]


def test_what_goes_wrong_with_values_is_said():
    def not_a_number(problem):
        result = PROVIDERS["eager"].run(problem)
        result.entropy[0, 0] = math.nan
        return result

    wrong = {
        "error of entropy nan; allowed 5e-01": not_a_number,
        "no logprobs": lambda problem: Result(),
    }
    for reason, run in wrong.items():
        row = Row("ours")
        measure_accuracy(case("logprobs-entropy"), [(replace(OURS, run=run), row)], QUICKLY)
        assert (row.state, row.reason, row.info) == ("wrong", reason, {})
