"""The table of what skipped rows and an adapter on the head save: no time without a check."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.generators import GENERATORS
from benchmarks.load import load
from benchmarks.results import report
from benchmarks.savings import VARIANTS, measure, measure_savings
from benchmarks.savings.table import savings_table
from benchmarks.savings.variants import Variant
from benchmarks.suites import entry
from benchmarks.tests import synthetic_results as made

NAMES = [variant.name for variant in VARIANTS]


def measured(dtype="fp32", rounds=2):
    return measure_savings(entry("dapo", "tiny", 64, dtype).case, "cpu", rounds)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_variant_is_right_and_timed(dtype):
    found = measured(dtype)
    assert [row["provider"] for row in found["rows"]] == NAMES
    for row in found["rows"]:
        assert row["failure"] is None, row
        assert len(row["seconds"]) == 2
        assert {"loss", "dhidden"} <= row["errors"].keys()
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("name", ["masked", "zero-active", "lora"])
def test_a_wrong_result_is_not_timed(name, monkeypatch):
    right = Variant.run

    def wrong(self, task):
        result = right(self, task)
        return (
            result
            if self.name != name
            else dataclasses.replace(result, dhidden=1.5 * result.dhidden)
        )

    monkeypatch.setattr(Variant, "run", wrong)
    rows = {row["provider"]: row for row in measured(rounds=1)["rows"]}
    assert "error of dhidden" in rows[name]["failure"]
    assert rows[name]["seconds"] == []
    assert rows["all"]["failure"] is None and len(rows["all"]["seconds"]) == 1


def test_what_raises_is_a_result(monkeypatch):
    def fails(row, variant, task):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(measure, "_check", fails)
    assert all("broken on purpose" in row["failure"] for row in measured()["rows"])


def stored(tmp_path):
    rows = [
        {"provider": "all", "note": "every token", "base": None, "seconds": [2.0, 2.2, 1.9]},
        {"provider": "masked", "note": "half", "base": "all", "seconds": [1.0, 1.1, 0.9]},
        {"provider": "lora", "note": "LoRA", "base": "frozen", "failure": "error of loss 2e-1"},
    ]
    table = {
        "model": "qwen2.5-0.5b", "tokens": 1024, "hidden": 896, "vocabulary": 151936,
        "dtype": "fp32", "reference": "float64", "rows": rows,
    }  # fmt: skip
    made.write(tmp_path, {**made.run([]), "savings": [table]})
    return load(tmp_path)["test-cpu"]


def test_times_are_shown_beside_what_is_saved_from(tmp_path):
    device = stored(tmp_path)
    text = savings_table(device.savings[0])
    assert "0.50 x all" in text and "FAILED: error of loss" in text
    assert "## What is saved" in report(device, tmp_path)


def test_documents_can_quote_a_saving(tmp_path):
    from benchmarks.context import Context, NotMeasuredError

    context = Context(devices={"test-cpu": stored(tmp_path)}, results="results")
    saved = GENERATORS["saved"]
    assert saved.call(context, "cpu", "fp32", "masked") == "0.50"
    with pytest.raises(NotMeasuredError):
        saved.call(context, "cpu", "bf16", "masked")
    with pytest.raises(ValueError, match="VARIANT: expected masked"):
        saved.check(["cpu", "fp32", "all"], context)
