"""The benchmark of generation and weight updates: what it runs, keeps and shows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.load import load
from benchmarks.results import report
from benchmarks.rollouts import ENGINES, measure, measure_rollouts, pairs, run
from benchmarks.rollouts.engines import NOT_INSTALLED
from benchmarks.rollouts.sizes import sizes
from benchmarks.rollouts.table import rollouts
from benchmarks.tests import synthetic_results as made
from benchmarks.training.task import TrainingConfig

TINY = TrainingConfig(
    layers=1, hidden=32, intermediate=32, heads=2, kv_heads=1, vocabulary=64,
    prompts=1, group=2, prompt_tokens=2, completion_tokens=3, micro_batches=1,
)  # fmt: skip


def entry(engine: str, **changes: Any) -> dict[str, Any]:
    [found] = [each for each in ENGINES if each.name == engine]
    base = {
        "engine": engine,
        "note": found.note,
        "sent": found.sent,
        "model": "a model",
        "dtype": "fp32",
        "sequences": 8,
        "prompt_tokens": 32,
        "completion_tokens": 64,
        "failure": None,
        "parameters": 2_000_000,
        "weight_bytes": 2**29,
        "tokens": [100.0, 200.0, 100.0],
        "seconds": [4.0, 4.0, 4.0],
        "phases": {"generate": [1.0, 1.0, 1.0], "sync": [0.5, 0.5, 0.5], "loss": [2.0, 3.0, 1.0]},
    }
    return base | changes


def table_of(tmp_path, *entries: dict[str, Any]) -> str:
    made.write(tmp_path, {**made.run([]), "rollouts": list(entries)})
    [device] = load(tmp_path).values()
    text = rollouts(device.rollouts)
    assert text in report(device, tmp_path)
    return text


def test_the_table(tmp_path):
    large = {"model": "a large model", "parameters": 10**9}
    text = table_of(
        tmp_path,
        entry("vllm-server", **large),
        entry("vllm-server-overlap"),
        entry("vllm-server"),
        entry("transformers"),
        entry("vllm-colocate", failure="out of memory", phases={}, seconds=[], tokens=[]),
    )
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    assert lines["transformers"] == "| transformers | 100 |  |  | 4.00 | 25 |  | 50 |"
    assert lines["vllm-server"].endswith("| 100 | 0.500 | 1.00 | 4.00 | 25 | 12 | 50 |")
    assert lines["vllm-server-overlap"].startswith("| vllm-server-overlap |  | 0.500 |")
    assert "FAILED: out of memory" in lines["vllm-colocate"]
    assert text.index("a model, 2.00 million parameters") < text.index("a large model, 1000")
    assert NOT_INSTALLED not in text
    assert "* `vllm-server`: a vLLM server on the same machine." in text


def test_engines_that_were_not_measured_are_named(tmp_path):
    assert f"vllm-colocate, vllm-server, vllm-server-overlap: {NOT_INSTALLED}." in table_of(
        tmp_path, entry("transformers")
    )


def test_the_newest_of_each_engine_counts(tmp_path):
    old = made.run([]) | {"rollouts": [entry("transformers"), entry("vllm-server")]}
    new = made.run([], environment=made.NEWER) | {
        "rollouts": [entry("transformers", tokens=[900.0] * 3)]
    }
    made.write(tmp_path, old)
    made.write(tmp_path, new)
    [device] = load(tmp_path).values()
    assert {each.engine: each.tokens[0] for each in device.rollouts} == {
        "transformers": 900.0,
        "vllm-server": 100.0,
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_measured(device):
    *_, largest = sizes(device)
    found = [(engine.name, size) for engine, size in pairs(device, full=True)]
    assert {name for name, size in found if size == largest} == {x.name for x in ENGINES}
    # what an update costs depends on the size; the other engines get none
    assert all(("vllm-server", size) in found for size in sizes(device))
    assert [size for name, size in found if name == "transformers"] == [largest]
    assert len(pairs(device, full=False)) == len(ENGINES)


def test_a_run():
    [engine] = [engine for engine in ENGINES if engine.name == "transformers"]
    found = run.run(engine, TINY, "cpu", steps=2)
    assert found["parameters"] > 0 and found["weight_bytes"] >= 4 * found["parameters"]
    assert len(found["tokens"]) == len(found["seconds"]) == 2
    assert all(2 <= tokens <= 6 for tokens in found["tokens"])
    assert set(found["phases"]) >= {"generate", "loss"}
    parts = [sum(values[i] for values in found["phases"].values()) for i in range(2)]
    assert parts == pytest.approx(found["seconds"])


def test_a_run_that_fails(monkeypatch, capfd):
    monkeypatch.setattr(measure.sys, "executable", "false")
    found = measure_rollouts(ENGINES[0], "small", "cpu", 1)
    assert found["failure"] == "exit code 1" and found["engine"] == "transformers"
