"""The comparison of exact and sampled gradients in training: what it runs and keeps."""

from __future__ import annotations

from benchmarks.curves import save_curves
from benchmarks.learning import ARMS, METRICS, SIZES, measure_learning, run
from benchmarks.report import show
from benchmarks.tests.stored import device, learning
from benchmarks.tests.stored import run as stored_run


def test_every_arm_begins_with_the_same_policy_and_logs_its_curves():
    size = SIZES["quick"]
    found = run(size, seed=0)
    assert list(found) == [arm.name for arm in ARMS]
    points = size.steps // size.every
    for name, curves in found.items():
        assert all(len(curve) == points for curve in curves.values())
        assert set(curves) == set(METRICS if name != "exact" else METRICS[:2])
        assert curves["reward"][0] == found["exact"]["reward"][0]
        assert all(error <= 2e-3 for error in curves.get("backward_error", ()))


def test_every_seed_is_kept(monkeypatch):
    asked = []

    def answer(module, words, timeout, **environment):
        asked.append(words)
        seed = float(words[1])
        return {arm.name: {"reward": [seed, 1.0], "entropy": [1.0, 0.5]} for arm in ARMS}

    monkeypatch.setattr("benchmarks.learning.ask", answer)
    found = measure_learning("quick")
    assert asked == [["quick", "0"], ["quick", "1"]] and found.steps == 2
    assert [row.provider for row in found.rows] == [arm.name for arm in ARMS]
    for row in found.rows:
        assert row.seeds == [0, 1] and row.curves["reward"] == [[0.0, 1.0], [1.0, 1.0]]


def test_a_seed_that_fails_is_a_result(monkeypatch):
    monkeypatch.setattr("benchmarks.learning.ask", lambda *_, **__: {"failure": "no memory"})
    assert [row.failure for row in measure_learning("quick").rows] == ["no memory"] * len(ARMS)


def test_the_table_and_the_picture(tmp_path):
    found = device(tmp_path, stored_run([], learning=[learning()]))
    said = show("learning", "cpu", {"test-cpu": found}).splitlines()
    assert "a policy; 40 steps of up to 512 tokens, 2 seeds, fp32. Test CPU; 2026-01-02." in said
    assert said[-3:] == [
        "| exact | n | 0.744 (0.738 to 0.750) | 0.950 (0.900 to 1.000) "
        "| 0.900 (0.900 to 0.900) | 0.100 (0.100 to 0.100) |  |  |  |",
        "| bounded | n | 0.744 (0.738 to 0.750) | 0.950 (0.900 to 1.000) "
        "| 0.900 (0.900 to 0.900) | 0.100 (0.100 to 0.100) | 34.3 | 6.2 | 1e-3 |",
        "| other | n | FAILED: no memory |  |  |  |  |  |  |",
    ]
    picture = tmp_path / "learning.png"
    save_curves(found.learning, tmp_path)
    assert picture.exists()
    save_curves([], tmp_path)
    assert not picture.exists()
