"""A pretrained model on real text: our trainer next to TRL's, with the same rows and settings.

A case ``curve-SEED`` or ``lora-SEED`` is a whole run of each trainer with one seed, ``time`` a few
steps of each in turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks import text
from benchmarks.child import ask
from benchmarks.conftest import Session
from benchmarks.measure import attempt
from benchmarks.providers.base import lacking
from benchmarks.real import RealCase, Setup, run
from benchmarks.real import lacking as lacking_model
from benchmarks.results import Row

_LONGEST = 7200.0  # seconds of a run
_ROUNDS = 3
_WARM_UP = 1  # steps whose time does not count


SETUPS = {
    "ours": Setup(note="grpo_trainer.GRPOTrainer", package="grpo_trainer"),
    "trl": Setup(note="trl.GRPOTrainer"),
    "trl-our-head": Setup(note="the same after trl.enable()", our_head=True),
    "ours-lora": Setup(note="LoRA of rank 16", package="grpo_trainer", lora=True),
    "trl-lora": Setup(note="LoRA of rank 16", lora=True),
    "ours-budget": Setup(
        note="at most 1,024 tokens in a micro-batch",
        package="grpo_trainer",
        changes={"max_tokens_per_micro_batch": 1024},
    ),
    "trl-accumulating": Setup(
        note="8 completions in a micro-batch",
        changes={"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
    ),
}
_VLLM = {
    "use_vllm": True,
    "vllm_gpu_memory_utilization": 0.1,
    "vllm_max_model_length": 256,
    "vllm_engine_kwargs": {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 256 << 20,
    },
}
SETUPS |= {
    f"ours-vllm{name}": Setup(
        note=f"vLLM generates in bf16, {note}",
        package="grpo_trainer",
        changes=_VLLM | {"vllm_importance_sampling_correction": corrected},
    )
    for name, note, corrected in (
        ("", "with the correction for it", True),
        ("-uncorrected", "without a correction", False),
    )
}
_WHOLE, _LORA = ("ours", "trl", "trl-our-head"), ("ours-lora", "trl-lora")
_TIMED = (*_WHOLE, *_LORA, "ours-budget", "trl-accumulating")
_COMPARED = {
    "time": _TIMED,
    "curve": _WHOLE,
    "lora": _LORA,
    "vllm": ("ours-vllm", "ours-vllm-uncorrected"),
    "gpu": ("ours", "trl"),
}
_CURVES = [
    *(RealCase("curve", 25, seed) for seed in range(3)),
    RealCase("lora", 25),
    RealCase("vllm", 25),
]
CASES = {
    "tiny": [RealCase(name, 2, tiny=True) for name in ("time", "curve", "lora")],
    "cpu": [RealCase("time", 3), *_CURVES],
    "gpu": [RealCase("gpu", 100)],
    "gpu-full": [RealCase("gpu", 100)],
}


def names(case: RealCase) -> list[str]:
    return list(_COMPARED[case.name])


def about(case: RealCase, device: str) -> str:
    return f"{case.steps} steps of 32 completions, AdamW, seed {case.seed}"


def measure(case: RealCase, names: Sequence[str], session: Session) -> list[Row]:
    """Run everybody in a process of its own: a whole run each, or a few steps in turns."""
    rows = [Row(name, SETUPS[name].note) for name in names]
    for row in rows:
        packages = ["trl"] * (SETUPS[row.provider].package == "trl")
        packages += ["peft"] * SETUPS[row.provider].lora
        packages += ["vllm"] * ("use_vllm" in SETUPS[row.provider].changes)
        row.leave_out("absent", lacking(*packages) or (None if case.tiny else lacking_model()))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(session.rounds(_ROUNDS) if case.name == "time" else 1):
        for row in filter(lambda row: row.runs, rows):
            with attempt(row):
                setup = SETUPS[row.provider]
                one = ask(run, setup, case, session.device, timeout=_LONGEST, HF_HUB_OFFLINE="1")
                found[row.provider].append(one)
    for row in rows:
        if row.runs:
            _fill(row, case, found[row.provider])
    return rows


def _fill(row: Row, case: RealCase, runs: list[dict[str, Any]]) -> None:
    """Give the row the times of all rounds, and the curves of the first."""
    first = runs[0]
    numbers = [*first["rewards"], *first["losses"], *first["gradient_norms"]]
    broken = len(first["rewards"]) != case.steps or not all(map(math.isfinite, numbers))
    row.leave_out("wrong", "a step is missing or not finite" if broken else None)
    if broken:
        return
    row.info |= {key: first[key] for key in ("rewards", "losses", "gradient_norms", "held_out")}
    if case.name != "time":
        before, after = first["held_out"][0], first["held_out"][-1]
        row.cells = {"held-out reward before": f"{before:.3f}", "after": f"{after:.3f}"}
    if case.name in ("time", "gpu"):
        _fill_times(row, runs)


def _fill_times(row: Row, runs: list[dict[str, Any]]) -> None:
    later = slice(_WARM_UP, None)
    row.seconds = [second for each in runs for second in each["seconds"][later]]
    generate = median(second for each in runs for second in each["generate_seconds"][later])
    tokens = sum(sum(each["tokens"][later]) for each in runs)
    row.info |= {
        "generate_seconds": generate,
        "tokens_per_second": tokens / sum(row.seconds),
        "peak_bytes": max(each["peak_bytes"] for each in runs),
    }
    row.cells |= {
        "generate": text.duration(generate),
        "train": text.duration(median(row.seconds) - generate),
        "trained tokens/s": text.digits(row.info["tokens_per_second"]),
        "peak MiB": text.mib(row.info["peak_bytes"]),
    }


def test_real(row: Row) -> None:
    """Train a pretrained model."""
    assert row.info["rewards"]
