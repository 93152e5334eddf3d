"""Result files with made-up measurements, in the format of ``benchmarks.record``."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.load import Device, load
from benchmarks.shapes import MODELS, Case
from benchmarks.work import WORKS

MIB = 2**20
# provider: time over the floor, extra memory over the logits, error in fp32
PROVIDERS = {
    "floor": (1.0, 0.05, None),
    "ours": (1.08, 0.06, 9e-7),
    "ours-input": (1.02, 0.05, 9e-7),
    "ours-two-pass": (1.35, 0.06, 9e-7),
    "ours-chunked": (1.3, 0.09, 1e-6),
    "ours-reference": (1.5, 2.0, 8e-7),
    "eager": (1.26, 2.2, 1e-6),
    "eager-entropy": (1.37, 2.2, 1e-6),
    "compile": (1.2, 1.6, 1e-6),
    "trl": (2.04, 0.9, 9e-7),
    "liger": (1.85, 0.5, 9e-7),
    "liger-triton": (1.4, 1.1, 2e-6),
    "liger-sm90": (1.1, 1.0, 3e-6),
    "cce": (1.15, 0.02, 4e-4),
    "cce-exact": (1.25, 0.02, 1e-6),
    "quack": (1.05, 0.3, 2e-6),
    "torch-lce": (1.6, 0.25, 1e-6),
}


def environment(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
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
    }
    return {**base, **changes}


NEWER = environment(date="2026-02-03T00:00:00+00:00", commit="f" * 40)


def row(provider: str, seconds: list[float] | None = None, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "provider": provider,
        "note": f"what {provider} runs",
        "absent": None,
        "unable": None,
        "failure": None,
        "errors": {},
        "seconds": seconds or [],
        "memory": None,
        "repeatable": None,
        "batch_invariant": None,
        "alone": False,
    }
    return {**base, **changes}


def table(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """Of dapo before the head of Qwen2.5-0.5B, unless told otherwise."""
    model = MODELS[changes.get("model", "qwen2.5-0.5b")]
    base: dict[str, Any] = {
        "work": "dapo",
        "model": model.name,
        "tokens": 1024,
        "sequences": 4,
        "hidden": model.hidden,
        "vocabulary": model.vocabulary,
        "softcap": model.softcap,
        "dtype": "fp32",
        "reference": "float64",
        "rows": rows,
    }
    return {**base, **changes}


def run(tables: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    base = {"environment": environment(), "tables": tables, "training": [], "tests": None}
    return {**base, **changes}


def write(folder: Path, data: dict[str, Any], slug: str = "test-cpu") -> Path:
    facts = data["environment"]
    path = folder / slug / f"{facts['date'][:10]}-{facts['commit'][:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


ERRORS = {"loss": 1e-9, "dhidden": 9e-7, "dweight": 8e-7}


def memory(extra: int, predicted: int | None = None) -> dict[str, Any]:
    sizes = {"extra": extra * MIB, "returned": 523 * MIB}
    return {**sizes, "predicted": predicted and predicted * MIB}


def rows() -> list[dict[str, Any]]:
    """One of each kind: timed, ours with a prediction, failed, absent, unable."""
    return [
        row("trl", [4.0, 4.4, 3.9], errors=ERRORS, memory=memory(1000), repeatable=True),
        row("eager", [2.6, 2.5, 2.7], errors=ERRORS, memory=memory(1300), alone=True),
        row("ours", [2.0, 2.2, 2.3], errors=ERRORS, memory=memory(200, predicted=190)),
        row("floor", [2.0, 2.0, 2.1], memory=memory(150)),
        row("cce", failure="error of dweight 2e-1; a|b", errors={"dweight": 0.2}),
        row("quack", absent="needs a GPU"),
        row("liger", unable="no softcap"),
    ]


def accuracy(**changes: Any) -> dict[str, Any]:
    """Four tokens: two likely, one open, one rare."""
    exact = {"logprobs": [-1e-3, -1e-2, -0.5, -9.0], "entropy": [0.01, 0.1, 1.5, 3.0]}
    ours = {"logprobs": [1e-7, -3e-7, 2e-6, -4e-6], "entropy": [1e-7, 1e-7, 2e-6, 4e-6]}
    rounded = {"logprobs": [1e-3, -3e-3, 0.0, 0.0625], "entropy": []}
    base: dict[str, Any] = {
        "model": "small",
        "tokens": 4,
        "hidden": 256,
        "vocabulary": 32000,
        "softcap": None,
        "dtype": "bf16",
        "reference": "float64",
        **exact,
        "rows": [
            accuracy_row("trl", **rounded),
            accuracy_row("ours", **ours),
            accuracy_row("eager", failure="ValueError: a|b"),
            accuracy_row("cce", absent="needs a GPU"),
            accuracy_row("liger", unable="a GRPO loss only"),
        ],
    }
    return {**base, **changes}


def accuracy_row(provider: str, **changes: Any) -> dict[str, Any]:
    reasons = {"absent": None, "unable": None, "failure": None}
    values: dict[str, Any] = {"logprobs": [], "entropy": []}
    return {"provider": provider, "note": f"what {provider} runs", **reasons, **values, **changes}


def device(tmp_path: Path, *runs: dict[str, Any]) -> Device:
    for data in runs:
        write(tmp_path, data)
    return load(tmp_path)["test-cpu"]


def training() -> dict[str, Any]:
    phases = {"generate": [0.5, 0.5], "train": [0.7, 0.9]}
    ours = {"provider": "ours", "note": "n", "absent": None, "failure": None}
    return {
        "model": "qwen2-shaped, 2 layers",
        "tokens": 512,
        "dtype": "fp32",
        "shape": {"layers": 2},
        "rows": [
            {**ours, "seconds": [1.2, 1.4], "phases": phases, "grad_norm": [0.5, 0.25]},
            {**ours, "provider": "trl", "seconds": [2.6, 2.6], "phases": {"train": [1.6]}},
            {**ours, "provider": "trl-liger", "absent": "needs a GPU", "seconds": []},
        ],
    }


def full_table(
    work: str, model: str, tokens: int, dtype: str, tflops: float, unavailable: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Every provider, with plausible numbers; ``unavailable`` need a GPU."""
    case = Case(MODELS[model], tokens, dtype, WORKS[work])
    noise = random.Random(f"{case}")
    floor = case.flop / (tflops * 1e12) + 2e-4
    logits = tokens * case.model.vocabulary * case.torch_dtype.itemsize
    rows = []
    for name, (slowdown, memory, error) in PROVIDERS.items():
        if name in unavailable:
            rows.append(row(name, absent="needs a GPU"))
        elif name == "quack" and work == "dapo":
            rows.append(row(name, unable="no loss"))
        elif name == "ours-input" and dtype == "fp32":
            rows.append(row(name, unable="the same as ours: nothing is rounded"))
        else:
            slower = (slowdown - 1) * noise.uniform(0.8, 1.2) * (1 + 300 / tokens)
            fixed = 90 * MIB * noise.uniform(0.7, 1.3)
            rows.append(
                row(
                    name,
                    [floor * (1 + slower) * noise.uniform(0.97, 1.08) for _ in range(5)],
                    errors=_errors(case, error, noise),
                    memory={
                        "extra": int(fixed + memory * logits),
                        "returned": 523 * MIB,
                        "predicted": int(fixed) if name == "ours" else None,
                    },
                    repeatable=None if name == "floor" else name != "cce",
                    batch_invariant=None if name == "floor" else name in ("ours", "ours-input"),
                    alone=name.startswith("cce"),
                )
            )
            if name == "cce" and (dtype == "fp32" or work == "dapo"):
                rows[-1].update(seconds=[], failure="error of dweight 4.1e-04; allowed 1e-04")
    return table(rows, work=work, model=model, tokens=tokens, sequences=case.sequences, dtype=dtype)


def _errors(case: Case, error: float | None, noise: random.Random) -> dict[str, float]:
    if error is None:
        return {}
    scale = 1.0 if case.dtype == "fp32" else 3e3
    return {
        name: error * scale * noise.uniform(0.5, 2) * (1e-2 if name == "loss" else 1)
        for name in case.work.outputs
    }
