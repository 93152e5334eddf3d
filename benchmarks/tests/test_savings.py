"""The table of what skipped rows and an adapter on the head save: no time without a check."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import savings
from benchmarks.savings import VARIANTS, Variant, measure_savings
from benchmarks.suites import entry

NAMES = [variant.name for variant in VARIANTS]


def measured(dtype="fp32", rounds=2):
    return measure_savings(entry("dapo", "tiny", 64, dtype).case, "cpu", rounds)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_variant_is_right_and_timed(dtype):
    found = measured(dtype)
    assert [row.provider for row in found.rows] == NAMES
    for row in found.rows:
        assert row.failure is None, row
        assert len(row.seconds) == 2
        assert {"loss", "dhidden"} <= row.errors.keys()


@pytest.mark.parametrize("name", ["masked", "zero-active", "lora"])
def test_a_wrong_result_is_not_timed(name, monkeypatch):
    right = Variant.run

    def wrong(self, *inputs):
        result = right(self, *inputs)
        return (
            result
            if self.name != name
            else dataclasses.replace(result, dhidden=1.5 * result.dhidden)
        )

    monkeypatch.setattr(Variant, "run", wrong)
    rows = {row.provider: row for row in measured(rounds=1).rows}
    assert "error of dhidden" in rows[name].failure
    assert rows[name].seconds == []
    assert rows["all"].failure is None and len(rows["all"].seconds) == 1


def test_what_raises_is_a_result(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(savings, "_check", fails)
    assert all("broken on purpose" in row.failure for row in measured().rows)
