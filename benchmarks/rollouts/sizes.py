"""The models that are trained: what an update of the weights costs depends on their size."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.rollouts.engines import ENGINES, Engine
from benchmarks.training.task import FULL, FULL_GPU, QUICK, TrainingConfig

_MIDDLE = replace(
    FULL, layers=4, hidden=512, intermediate=2048, heads=8, vocabulary=32000, completion_tokens=32
)
_CPU = {"small": QUICK, "middle": _MIDDLE, "large": replace(FULL, completion_tokens=32)}
_GPU = {
    "middle": replace(FULL_GPU, layers=12),
    # the width of Qwen2.5-1.5B
    "large": replace(FULL_GPU, layers=14, hidden=1536, intermediate=8960, heads=12),
}


def sizes(device: str) -> dict[str, TrainingConfig]:
    """Return the model sizes, smallest first."""
    return _GPU if device == "cuda" else _CPU


def pairs(device: str, full: bool) -> list[tuple[Engine, str]]:
    """Return the pairs to measure: every engine on the largest model, and on the others the engines
    that are sent weights. Not ``full``: every engine on the smallest."""
    first, *_, last = names = list(sizes(device))
    if not full:
        return [(engine, first) for engine in ENGINES]
    return [(engine, name) for name in names for engine in ENGINES if engine.sent or name == last]
