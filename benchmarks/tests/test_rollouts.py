"""The benchmark of generation and weight updates: what it runs and keeps."""

from __future__ import annotations

import psutil
import pytest

from benchmarks import child
from benchmarks.rollouts.engines import ENGINES
from benchmarks.rollouts.measure import SIZES, measure_rollouts, pairs, run
from benchmarks.tests.stored import NEWER, device, rollouts
from benchmarks.tests.stored import run as stored_run
from benchmarks.training.task import TrainingConfig

TINY = TrainingConfig(
    layers=1, hidden=32, intermediate=32, heads=2, kv_heads=1, vocabulary=64,
    prompts=1, group=2, prompt_tokens=2, completion_tokens=3, micro_batches=1,
)  # fmt: skip


def test_the_newest_of_each_engine_counts(tmp_path):
    old = stored_run([], rollouts=[rollouts("transformers"), rollouts("vllm-server")])
    newer = [rollouts("transformers", tokens=[900.0] * 3)]
    found = device(tmp_path, old, stored_run([], rollouts=newer, environment=NEWER))
    tokens = {each.engine: each.tokens[0] for each in found.rollouts}
    assert tokens == {"transformers": 900.0, "vllm-server": 100.0}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_measured(device):
    *_, largest = SIZES[device]
    found = [(engine.name, size) for engine, size in pairs(device, full=True)]
    assert {name for name, size in found if size == largest} == {x.name for x in ENGINES}
    # what an update costs depends on the size; the other engines get none
    assert all(("vllm-server", size) in found for size in SIZES[device])
    assert [size for name, size in found if name == "transformers"] == [largest]
    assert len(pairs(device, full=False)) == len(ENGINES)


def test_a_run():
    [engine] = [engine for engine in ENGINES if engine.name == "transformers"]
    found = run(engine, TINY, "cpu", steps=2)
    assert found["parameters"] > 0 and found["weight_bytes"] >= 4 * found["parameters"]
    assert len(found["tokens"]) == len(found["seconds"]) == 2
    assert all(2 <= tokens <= 6 for tokens in found["tokens"])
    assert set(found["phases"]) >= {"generate", "loss"}
    parts = [sum(values[i] for values in found["phases"].values()) for i in range(2)]
    assert parts == pytest.approx(found["seconds"])


def test_a_run_that_fails(monkeypatch, capfd):
    monkeypatch.setattr(child.sys, "executable", "false")
    found = measure_rollouts(ENGINES[0], "small", "cpu", 1)
    assert found.failure == "exit code 1" and found.engine == "transformers"


def test_a_run_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch):
    started = tmp_path / "started"
    hang = tmp_path / "hang"
    hang.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {started}\nwait\n")
    hang.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(hang))
    communicate = child.subprocess.Popen.communicate

    def once_started(self, timeout):
        while not started.exists() or not started.read_text().strip():
            pass
        return communicate(self, timeout=0.01)

    monkeypatch.setattr(child.subprocess.Popen, "communicate", once_started)
    assert child.ask("any", [], 3.0) == {"failure": "did not finish in 3 s"}
    found = [x for x in psutil.process_iter() if x.pid == int(started.read_text())]
    assert all(x.status() == psutil.STATUS_ZOMBIE for x in found)
