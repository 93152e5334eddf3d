"""Steps of a pretrained model on real text: our trainer next to TRL, in turns.

Both have the same rows and settings; ``test_curves.py`` has whole runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks import text
from benchmarks.child import ask
from benchmarks.conftest import Session, check_row
from benchmarks.measure import attempt
from benchmarks.real import SETUPS, RealCase, lacking, run
from benchmarks.results import Row

_ROUNDS = 2
_WARM_UP = 1  # steps without a time
_NAMES = tuple(name for name in SETUPS if "vllm" not in name)
_TINY = ("trl", "ours-budget", "trl-whole-batch")  # test_curves.py runs the others
CASES = {"tiny": [RealCase(2, tiny=True)], "cpu": [RealCase(3)]}


def notes(case: RealCase) -> dict[str, str]:
    return {name: SETUPS[name].note for name in (_TINY if case.tiny else _NAMES)}


def about(case: RealCase, device: str) -> str:
    return "steps of 32 completions, AdamW"


def measure(case: RealCase, rows: Sequence[Row], session: Session) -> None:
    """Take a few steps of each setup in a separate process, in several rounds."""
    found: dict[str, list[dict[str, Any]]] = {row.provider: [] for row in rows}
    for row in rows:
        row.leave_out("absent", lacking(SETUPS[row.provider], case))
    for _ in range(session.rounds(_ROUNDS)):
        for row in filter(lambda row: row.runs, rows):
            with attempt(row):
                found[row.provider].append(ask(run, SETUPS[row.provider], case, session.device))
    for row in rows:
        if row.runs:
            fill_times(row, found[row.provider])
            base = "trl-lora" if SETUPS[row.provider].lora else "trl"
            _compare(row, found[row.provider][0], found.get(base, []))


def _compare(row: Row, run: dict[str, Any], theirs: Sequence[dict[str, Any]]) -> None:
    """Add the largest differences from TRL's first run, which samples the same tokens."""
    for other in theirs[:1]:
        for name in ("losses", "gradient_norms"):
            pairs = zip(run[name], other[name], strict=True)
            row.errors[name] = max(abs(own - their) for own, their in pairs)
    broken = not all(map(math.isfinite, [*run["losses"], *run["gradient_norms"]]))
    row.leave_out("wrong", "a step is not finite" if broken else None)


def fill_times(row: Row, runs: Sequence[dict[str, Any]]) -> None:
    """Add the times of several runs, without their first steps, and their peak memory."""
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


test_real = check_row
