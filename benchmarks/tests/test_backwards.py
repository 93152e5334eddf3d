"""The table of the backwards: right inputs, and no time without a check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.backwards import measure
from benchmarks.backwards.measure import measure_backwards
from benchmarks.backwards.providers import BARE_WORK, OURS, WAYS, ways
from benchmarks.check import reference
from benchmarks.problem import make_problem
from benchmarks.report import show
from benchmarks.shapes import MODELS, SPREADS, Case
from benchmarks.tests.stored import ERRORS, device, memory, row, run
from benchmarks.work import WORKS


def case(inputs: str = "policy-like", dtype: str = "fp32", model: str = "tiny") -> Case:
    return Case(MODELS[model], 32, dtype, WORKS["logprobs-grad"], inputs)


def measured(**options):
    return measure_backwards(case(**options), "cpu", 1, memory=False, slow=False)


@pytest.mark.parametrize("inputs", SPREADS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_everybody_is_right_and_timed(inputs: str, dtype: str) -> None:
    found = measured(inputs=inputs, dtype=dtype)
    expected = [(BARE_WORK, "bare-gemms")]
    expected += [(work, x.name) for work, of in ways(inputs).items() for x in of]
    assert [(one.work, one.provider) for one in found.rows] == expected
    for one in found.rows:
        assert one.failure is None, one
        assert len(one.seconds) == one.runs
        if one.provider in OURS:
            outputs = {"logprobs" if "logprobs" in one.work else "loss", "dhidden"}
            assert outputs <= one.errors.keys()
        bounded = one.provider.startswith("ours-bounded") and one.work != "dapo"
        assert len(one.entries) == (32 if bounded else 0)
    assert len(found.entropy) == len(found.logprobs) == 32


def test_inputs_are_as_peaked_as_they_are_called() -> None:
    """At the small head, which has a fifth of the real one's ids."""
    means = {}
    for inputs in SPREADS:
        problem = make_problem(replace(case(inputs, model="small"), tokens=256))
        exact = reference(problem)
        assert exact.logprobs is not None and exact.entropy is not None
        means[inputs] = exact.entropy.mean()
        logits = problem.hidden.detach().flatten(0, 1) @ problem.weight.detach().t()
        subnormal = logits.softmax(-1) < torch.finfo(torch.float32).tiny
        assert subnormal.double().mean() < 1e-3
        if inputs != "peaked":  # its targets are raised, not drawn
            torch.testing.assert_close(
                -exact.logprobs.mean(), means[inputs], atol=0.15 + 0.1 * means[inputs], rtol=0
            )
    assert 0.15 < means["policy-like"] < 0.5 < 1.2 < means["text-like"] < 2.5


def test_a_wrong_gradient_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = OURS["ours-kept"]

    def wrong(problem):
        result = usual.run(problem)
        return replace(result, dhidden=1.01 * result.dhidden)

    broken = replace(usual, run=wrong)
    monkeypatch.setattr(measure, "ways", lambda inputs: {"logprobs-grad": (broken, *WAYS["dapo"])})
    rows = {one.provider: one for one in measured().rows}
    assert "error of dhidden" in rows["ours-kept"].failure and not rows["ours-kept"].seconds
    assert rows["eager"].seconds


def stored(dtype: str, inputs: str = "policy-like", **changes) -> dict:
    rows = [
        row("bare-gemms", [2.0], work=BARE_WORK),
        row("ours-kept", [6.0, 6.2, 6.1], work="logprobs-grad", errors=ERRORS, memory=memory(600)),
        row(
            "ours-bounded-2e-3", [2.5], work="logprobs-grad", errors=ERRORS,
            entries=[1, 3, -1, 8], memory=memory(50),
        ),
        row("eager", failure="wrong", work="logprobs-grad"),
        row("compile", absent="starts slowly", work="logprobs-grad"),
    ]  # fmt: skip
    return {
        "model": "small", "tokens": 4, "hidden": 256, "vocabulary": 32000, "dtype": dtype,
        "inputs": inputs, "reference": "float64", "logprobs": [-0.001, -0.1, -0.5, -9.0],
        "entropy": [0.1, 0.2, 0.3, 0.6], "rows": rows, **changes,
    }  # fmt: skip


def test_the_table(tmp_path: Path) -> None:
    every = [stored("bf16", "peaked"), stored("bf16"), stored("fp32")]
    found = {"test-cpu": device(tmp_path, run([], backwards=every))}
    lines = show("backwards", "cpu", found).splitlines()
    assert lines[2].startswith(
        "policy-like: entropies of 0.30 nats in the mean, at most 0.60; 25 %"
    )
    assert lines[4].startswith("|  |  | fp32: x P | extra MiB | dhidden | dweight | entries: mean")
    assert lines[6].startswith("| logprobs | bare-gemms | 1.00 (2.00 s) |  |")
    cells = "3.05 | 600 | 9e-7 | 8e-7 |  |  "
    assert lines[7] == f"| logprobs-grad | **ours-kept** | {cells}| {cells}|"
    cells = "1.25 | 50 | 9e-7 | 8e-7 | 4.0 (8) | 25 "
    assert lines[8] == f"| logprobs-grad | **ours-bounded-2e-3** | {cells}| {cells}|"
    assert "| eager | FAILED |" in lines[9]
    assert "compile" not in "\n".join(lines)
    assert any(line.startswith("peaked: ") for line in lines[10:])
    assert show("backwards", "cuda", found) == "not measured yet"
