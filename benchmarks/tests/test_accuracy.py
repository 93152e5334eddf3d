"""The accuracy table: distributions like a policy's, and a row for everybody, come what may."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from benchmarks import child
from benchmarks.accuracy.measure import make_problem, measure_accuracy, measure_one
from benchmarks.accuracy.providers import ADDED, PROVIDERS
from benchmarks.check import compare, reference
from benchmarks.figures import BANDS, accuracy_figures
from benchmarks.problem import Result
from benchmarks.providers.base import Provider
from benchmarks.results import AccuracyRow
from benchmarks.shapes import DTYPES, MODELS, Case
from benchmarks.suites import ACCURACY, SUITES
from benchmarks.tables.others import accuracy_table
from benchmarks.work import WORKS

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def case(
    dtype: str = "bf16", model: str = "tiny", tokens: int = 32, work: str = "logprobs-entropy"
) -> Case:
    return Case(MODELS[model], tokens, dtype, WORKS[work])


def row(provider: Provider, **settings) -> AccuracyRow:
    (only,) = measure_accuracy(case(), "cpu", providers=[provider], **settings).rows
    return only


def like_eager(run, **changes) -> Provider:
    return dataclasses.replace(PROVIDERS["eager"], name="other", run=run, **changes)


def test_distributions_are_those_of_a_policy():
    exact = reference(make_problem(case("fp32", "small", 512), "cpu"))
    probability, entropy = exact.logprobs.exp().flatten(), exact.entropy.flatten()
    assert (probability > 0.9).double().mean() > 0.55
    assert (probability > 0.999).double().mean() > 0.1
    assert 0.1 < ((entropy > 1) & (entropy < 4)).double().mean() < 0.3
    assert 0 < (probability < 1e-3).double().mean() < 0.05 and probability.min() > 1e-9
    # drawn from them: the mean log-probability of the tokens is that of the distributions
    assert exact.logprobs.mean().item() == pytest.approx(-entropy.mean().item(), abs=0.15)


@every_dtype
def test_distributions_are_the_same_every_time(dtype):
    first, again = (make_problem(case(dtype), "cpu") for _ in range(2))
    for name in ("hidden", "weight", "target"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert not first.hidden.requires_grad and first.hidden.dtype == DTYPES[dtype]


@every_dtype
@pytest.mark.parametrize("name", [each.name for each in ADDED])
def test_added_ones_agree_with_the_reference(name, dtype):
    provider = PROVIDERS[name]
    for work in ("logprobs", "logprobs-entropy"):
        problem = make_problem(dataclasses.replace(case(dtype), work=WORKS[work]), "cpu")
        if (provider.absent("cpu") or provider.unable(problem.case)) is None:
            assert compare(provider.run(problem), reference(problem), problem).passed, work


def test_verl_style_rounds_what_it_returns():
    result = PROVIDERS["verl-style"].run(make_problem(case(), "cpu"))
    assert result.logprobs.dtype == result.entropy.dtype == torch.bfloat16


@every_dtype
def test_ours_is_as_exact_as_eager_in_fp32(dtype):
    """At most twice its error; and where inputs are rounded, far below those who round logits."""
    names = ("ours", "eager", "eager-fp32")
    entry = measure_accuracy(
        case(dtype, "small", 128), "cpu", providers=[PROVIDERS[name] for name in names]
    )
    found = accuracy_figures(entry)
    ours, exact = found["ours"], found["eager" if dtype == "fp32" else "eager-fp32"]
    assert ours.mean_noise <= 2 * exact.mean_noise and ours.noise.maximum <= 2 * exact.noise.maximum
    assert ours.entropy.maximum <= 2 * exact.entropy.maximum
    for band in BANDS:
        assert ours.logprobs[band].maximum <= 2 * exact.logprobs[band].maximum
    if dtype == "bf16":
        assert 1e-3 < found["eager"].mean_noise < 0.1 and ours.mean_noise < 1e-4


@pytest.fixture(scope="module")
def gradients():
    """Return the errors of a loss and its gradients, by dtype."""
    names = ("ours", "ours-input", "ours-two-pass", "eager", "eager-fp32")
    found = {}
    for dtype in DTYPES:
        entry = measure_accuracy(
            case(dtype, "small", 128, "dapo"), "cpu", providers=[PROVIDERS[n] for n in names]
        )
        found[dtype] = accuracy_figures(entry)
    return found


@every_dtype
@pytest.mark.parametrize("name", ["ours", "ours-input", "ours-two-pass"])
def test_gradients_of_ours_are_at_least_as_exact_as_of_eager(name, dtype, gradients):
    """In loss, dhidden and dweight, and in the rows of dhidden of decided tokens."""
    if name == "ours-input" and dtype == "fp32":
        pytest.skip("nothing is rounded")
    ours, eager = (gradients[dtype][each] for each in (name, "eager"))
    # rounded at the same place as eager's, the errors are the same but for the order of sums
    slack = 1.1 if name == "ours-input" else 1.0
    assert set(ours.row.errors) == {"loss", "dhidden", "dweight"}
    least = {"loss": 5e-7}  # one fp32 number of order 1: an error below is luck
    for output, error in ours.row.errors.items():
        assert error <= max(slack * eager.row.errors[output], least.get(output, 0.0)), output
    decided = next(iter(BANDS))
    assert ours.gradients[decided].median <= slack * eager.gradients[decided].median
    assert ours.gradients[decided].maximum <= slack * eager.gradients[decided].maximum


def test_rows_of_decided_tokens_are_exact_to_the_last_bit_of_bf16(gradients):
    """Rounded logits leave a tenth of such a row wrong."""
    found, decided = gradients["bf16"], next(iter(BANDS))
    for name in ("ours", "ours-two-pass"):
        assert found[name].gradients[decided].median < 2**-8
        assert found[name].gradients[decided].maximum < 2**-6
        assert found[name].row.errors["dhidden"] < 2**-8 > found[name].row.errors["dweight"]
        assert found[name].row.errors["loss"] < 1e-6
    assert found["eager"].gradients[decided].maximum > 2**-6


def test_rows_without_a_gradient_have_no_error():
    """Some tokens of an off-policy loss are clipped."""
    entry = measure_accuracy(
        case("fp32", work="dapo"), "cpu", providers=[PROVIDERS["ours"], PROVIDERS["liger-head"]]
    )
    assert entry.entropy == [] and 0 < entry.dhidden.count(0.0) < len(entry.dhidden) == 32
    ours, other = entry.rows
    assert other.unable == "its gradients are liger's"
    pairs = zip(ours.dhidden, entry.dhidden, strict=True)
    assert not any(error for error, norm in pairs if norm == 0)


@pytest.mark.parametrize("work", ["logprobs-entropy", "dapo"])
def test_nobody_is_hidden(work):
    """A table names every provider, with values or with the reason for having none."""
    entry = measure_accuracy(case("bf16", work=work), "cpu", slow=False)
    assert [each.provider for each in entry.rows] == list(PROVIDERS)
    said = accuracy_table(entry)
    lines, missing = said.splitlines()[2:-2], said.splitlines()[-1]
    shown = {line.split("|")[1].strip().strip("*") for line in lines}
    for each in entry.rows:
        reasons = [each.absent, each.unable, each.failure]
        assert bool(each.logprobs or each.errors) == (reasons == [None, None, None])
        listed = each.absent or each.unable
        assert (each.provider in shown) == (listed is None)
        assert listed is None or (listed in missing and each.provider in missing)
        assert each.failure is None or each.failure in said
    assert "compile" in missing and "cce" in missing


def test_what_goes_wrong_is_said():
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
        "ZeroDivisionError: division by zero": lambda problem: 1 / 0,
        "AssertionError: no logprobs": lambda problem: Result(),
    }
    for reason, run in wrong.items():
        found = row(like_eager(run))
        assert found.failure == reason
        assert found.logprobs == found.entropy == []
    assert row(PROVIDERS["eager"], deadline=0.0).absent == "not reached: the time was up"
    slow = like_eager(PROVIDERS["eager"].run, slow_start=True)
    assert row(slow, slow=False).absent == "starts slowly: not in this case"
    assert row(slow).absent is None


def test_who_has_no_entropy_gives_log_probabilities():
    provider = like_eager(
        PROVIDERS["eager"].run, unable=lambda case: "no entropy" if case.work.entropy else None
    )
    found = row(provider)
    assert len(found.logprobs) == 32 and found.entropy == [] and found.unable is None


def test_who_may_hang_has_a_process_of_its_own(monkeypatch):
    asked = []

    def ask(what, case, name, rounds, timeout):
        asked.append((what, name, timeout))
        return dataclasses.asdict(measure_one(case, PROVIDERS["eager"], "cpu"))

    monkeypatch.setattr(child, "_ask", ask)
    provider = like_eager(lambda problem: 1 / 0, timeout=9.0)
    assert len(row(provider).logprobs) == 32 and asked == [("accuracy", "other", 9.0)]


def test_every_suite_has_distributions():
    assert ACCURACY.keys() == SUITES.keys()
    for entries in ACCURACY.values():
        assert entries and len({str(each) for each in entries}) == len(entries)
        assert {each.case.work.name for each in entries} <= {"logprobs-entropy", "dapo"}
        assert entries[0].case.work.name == "logprobs-entropy"
