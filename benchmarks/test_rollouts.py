"""Generation, weight updates and the rest of a training step, by engine."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.child import ask
from benchmarks.conftest import DEVICE, Session
from benchmarks.measure import attempt
from benchmarks.results import Row
from benchmarks.training.engines import ENGINES, run
from benchmarks.training.task import Sized
from benchmarks.training.trainers import precision

_STEPS = 3
_LONGEST = 600.0  # seconds of an engine that starts and trains a few steps
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine share the cores
}
_GPU = [Sized(size, precision(DEVICE)) for size in ("middle-gpu", "large-gpu")]
CASES = {
    "tiny": [Sized("tiny", precision(DEVICE))],
    "quick": [Sized("quick", precision(DEVICE))],
    "cpu": [Sized(size) for size in ("quick", "middle", "large")],
    "gpu": _GPU,
    "gpu-full": _GPU,
}


def names(case: Sized) -> list[str]:
    """Return every engine; at a middle size those that are sent weights, which cost by size."""
    return [name for name, x in ENGINES.items() if x.sent or not case.size.startswith("middle")]


def measure(case: Sized, names: Sequence[str], session: Session) -> list[Row]:
    """Measure engines, one after another: each fills the machine."""
    environment = dict(_ENVIRONMENT)
    if session.device == "cpu":
        environment["TORCHDYNAMO_DISABLE"] = "1"
    rows = []
    for name in names:
        row = Row(name, ENGINES[name].note)
        row.leave_out("absent", ENGINES[name].absent())
        if row.runs:
            arguments = name, case.config, session.device, _STEPS
            with attempt(row):
                vars(row).update(ask(run, *arguments, timeout=_LONGEST, **environment))
        rows.append(row)
    return rows


def about(case: Sized, device: str) -> str:
    config = case.config
    return (
        f"{config.sequences} completions of up to {config.completion_tokens} tokens after "
        f"{config.prompt_tokens}"
    )


def test_rollouts(row: Row) -> None:
    """Time a training step with an engine."""
    assert row.seconds
