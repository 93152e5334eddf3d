"""GPU kernels at the tiles that are worth a try; the best belong into ``gpu_tiles.py``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.conftest import Session
from benchmarks.measure import attempt, free
from benchmarks.results import Row
from benchmarks.tiles import Kernel, difference
from benchmarks.timing import in_turns, make_timer

_HEAD = "qwen3-1.7b"
_GPU = [
    Kernel("both", _HEAD, 2048),
    Kernel("fused forward", _HEAD, 8192),
    Kernel("loss", _HEAD, 32768),
    Kernel("statistics", _HEAD, 2048),
    Kernel("gradient", _HEAD, 2048),
    Kernel("both", _HEAD, 2048, "bf16"),
    *(Kernel("fused forward", name, 8192) for name in ("qwen3-8b", "gemma-3-4b")),
]
CASES = {
    "tiny": [Kernel(name, "tiny", 8) for name in ("both", "statistics", "gradient")],
    "quick": [],
    "cpu": [],
    "gpu": _GPU[:3],
    "gpu-full": _GPU,
}


def names(case: Kernel) -> list[str]:
    return list(case.candidates())


def measure(case: Kernel, names: Sequence[str], session: Session) -> list[Row]:
    """Compare every tile with the default, and time those that agree in turns."""
    run, timer = case.run_of(session.device), make_timer(session.device)
    every = case.candidates()
    default = next(iter(every))
    rows = [Row(name, "the default" if name == default else "") for name in names]
    want = run(every[default])
    for row in rows:
        with attempt(row):  # it does not compile, or does not fit: a result like any other
            row.leave_out("wrong", difference(run(every[row.provider]), want))
    present = [(row, every[row.provider]) for row in rows if row.runs]
    for row, tile in in_turns(present, session.rounds):
        row.seconds.append(timer(lambda tile=tile: run(tile)))
    free(session.device)
    return rows


def test_tiles(row: Row) -> None:
    """Time a kernel at a tile."""
    assert row.seconds
