"""Result files with made-up measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.results import Device, load
from benchmarks.shapes import MODELS

MIB = 2**20
ERRORS = {"loss": 1e-9, "dhidden": 9e-7, "dweight": 8e-7}


def environment(**changes: Any) -> dict[str, Any]:
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "modified": False,
        "device": "Test CPU",
        "kind": "cpu",
        "isa": "AVX512",
        "threads": 2,
        "memory_gib": 24.0,
        "python": "3.11.7",
        "load_average": 0.4,
        "versions": {"torch": "2.13.0", "trl": "1.16.0", "quack-kernels": None},
        **changes,
    }


NEWER = environment(date="2026-02-03T00:00:00+00:00", commit="f" * 40)


def row(provider: str, seconds: list[float] | None = None, **changes: Any) -> dict[str, Any]:
    note = f"what {provider} runs"
    return {"provider": provider, "note": note, "seconds": seconds or [], **changes}


def memory(extra: int) -> dict[str, Any]:
    return {"extra": extra * MIB, "returned": 523 * MIB, "predicted": None}


def rows() -> list[dict[str, Any]]:
    """Return one row of each kind: timed, alone, failed, absent, unable."""
    return [
        row("trl", [4.0, 4.4, 3.9], errors=ERRORS, memory=memory(1000), repeatable=True),
        row("eager", [2.6, 2.5, 2.7], errors=ERRORS, memory=memory(1300), alone=True),
        row("ours", [2.0, 2.2, 2.3], errors=ERRORS, memory=memory(200)),
        row("bare-gemms", [2.0, 2.0, 2.1], memory=memory(150)),
        row("cce", failure="error of dweight 2e-1; a|b", errors={"dweight": 0.2}),
        row("quack", absent="needs a GPU"),
        row("liger", unable="no softcap"),
    ]


def table(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """Return a table of dapo before the head of Qwen2.5-0.5B, unless told otherwise."""
    model = MODELS["qwen2.5-0.5b"]
    return {
        "work": "dapo",
        "model": model.name,
        "tokens": 1024,
        "sequences": 4,
        "hidden": model.hidden,
        "vocabulary": model.vocabulary,
        "softcap": None,
        "dtype": "fp32",
        "reference": "float64",
        "rows": rows,
        **changes,
    }


def accuracy(**changes: Any) -> dict[str, Any]:
    """Return four tokens: two likely, one open, one rare."""
    ours = {"logprobs": [1e-7, -3e-7, 2e-6, -4e-6], "entropy": [1e-7, 1e-7, 2e-6, 4e-6]}
    return {
        "model": "small",
        "tokens": 4,
        "hidden": 256,
        "vocabulary": 32000,
        "softcap": None,
        "dtype": "bf16",
        "reference": "float64",
        "logprobs": [-1e-3, -1e-2, -0.5, -9.0],
        "entropy": [0.01, 0.1, 1.5, 3.0],
        "rows": [
            {"provider": "trl", "note": "n", "logprobs": [1e-3, -3e-3, 0.0, 0.0625]},
            {"provider": "ours", "note": "n", **ours},
            {"provider": "eager", "note": "n", "failure": "ValueError: a|b"},
            {"provider": "cce", "note": "n", "absent": "needs a GPU"},
            {"provider": "liger", "note": "n", "unable": "a GRPO loss only"},
        ],
        **changes,
    }


def rollouts(engine: str, **changes: Any) -> dict[str, Any]:
    return {
        "engine": engine,
        "note": "n",
        "sent": engine.startswith("vllm"),
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
        **changes,
    }


def run(tables: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {"environment": environment(), "tables": tables, **changes}


def write(folder: Path, data: dict[str, Any], slug: str = "test-cpu") -> Path:
    facts = data["environment"]
    path = folder / slug / f"{facts['date'][:10]}-{facts['commit'][:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def device(folder: Path, *runs: dict[str, Any]) -> Device:
    for data in runs:
        write(folder, data)
    return load(folder)["test-cpu"]
