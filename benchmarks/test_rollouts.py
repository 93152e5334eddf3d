"""Generation, weight updates and the rest of a training step, by engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.child import ask
from benchmarks.conftest import DEVICE, Session
from benchmarks.measure import attempt
from benchmarks.results import Row
from benchmarks.training.engines import ENGINES, run
from benchmarks.training.task import SIZES, TrainingConfig
from benchmarks.training.trainers import precision

_STEPS = 3
_LONGEST = 600.0  # seconds of an engine that starts and trains a few steps
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine share the cores
}
_GPU = [replace(SIZES[name], dtype=precision(DEVICE)) for name in ("middle-gpu", "large-gpu")]
CASES = {
    "tiny": [replace(SIZES["tiny"], dtype=precision(DEVICE))],
    "quick": [replace(SIZES["quick"], dtype=precision(DEVICE))],
    "cpu": [SIZES[name] for name in ("quick", "middle", "large")],
    "gpu": _GPU,
    "gpu-full": _GPU,
}


def names(case: TrainingConfig) -> list[str]:
    """Return every engine; at a middle size those that are sent weights, which cost by size."""
    return [name for name, x in ENGINES.items() if x.sent or not case.name.startswith("middle")]


def measure(case: TrainingConfig, names: Sequence[str], session: Session) -> list[Row]:
    """Measure engines, one after another: each fills the machine."""
    environment = dict(_ENVIRONMENT)
    if session.device == "cpu":
        environment["TORCHDYNAMO_DISABLE"] = "1"
    rows = []
    for name in names:
        row = Row(name, ENGINES[name].note)
        row.leave_out("absent", ENGINES[name].absent())
        if row.runs:
            arguments = name, case, session.device, _STEPS
            with attempt(row):
                vars(row).update(ask(run, *arguments, timeout=_LONGEST, **environment))
        rows.append(row)
    return rows


def about(case: TrainingConfig, device: str) -> str:
    return (
        f"{case.sequences} completions of up to {case.completion_tokens} tokens after "
        f"{case.prompt_tokens}"
    )


def test_rollouts(row: Row) -> None:
    """Time a training step with an engine."""
    assert row.seconds
