"""The GPU tests, shared out over processes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.job import Finished, Job
from benchmarks.gpu.log import Log
from benchmarks.gpu.parts import Outcome

TESTS = (
    "tests/backends",
    "tests/engine",
    "tests/head",
    "tests/schedule",
    "tests/test_linear_logprobs.py",
    "tests/test_linear_policy_loss.py",
)
MARKER = "gpu"
TALLY = "tests.json"
_MOST_SHARDS = 8
_NOTHING_COLLECTED = 5  # pytest's exit code


@dataclass
class Tally:
    """Results of all shards."""

    outcomes: dict[str, str] = field(default_factory=dict)  # by test
    messages: dict[str, str] = field(default_factory=dict)  # of those that failed
    collected: int = 0

    def count(self, outcome: str) -> int:
        return sum(value == outcome for value in self.outcomes.values())

    @property
    def missing(self) -> int:
        """Collected but never run, because their process ended before."""
        return max(0, self.collected - len(self.outcomes))

    def add(self, events: Sequence[Mapping[str, Any]], finished: Finished) -> None:
        """One shard's; the test at which it was stopped, or crashed, has failed."""
        running: str | None = None
        for event in events:
            if event["event"] == "collected":
                self.collected += event["count"]
            elif event["event"] == "started":
                running = event["test"]
            else:
                running = None
                self._note(event["test"], event["outcome"], event["message"])
        if running is not None:
            end = "did not finish" if finished.code is None else f"exit code {finished.code}"
            self._note(running, "failed", f"{end}: {finished.last_line}"[:300])

    def _note(self, test: str, outcome: str, message: str) -> None:
        if self.outcomes.get(test) != "failed":  # a failing teardown follows a passed call
            self.outcomes[test] = outcome
        if outcome == "failed":
            self.messages.setdefault(test, message)


def run_tests(
    limit: float,
    log: Log,
    environment: Mapping[str, str],
    folder: Path,
    tests: Sequence[str] = TESTS,
    marker: str = MARKER,
) -> Outcome:
    """Leaves the counts in ``folder``, as the result file has them."""
    start, count = time.monotonic(), _shards()
    # a test on the device needs no 16 threads beside it
    environment = {**environment, "OMP_NUM_THREADS": "2"}
    reports = [folder / f"shard-{index}.jsonl" for index in range(count)]
    outputs: list[list[str]] = [[] for _ in reports]
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                Job(_command(tests, marker, index, reports), environment, outputs[index].append)
            )
            for index in range(count)
        ]
        finished = _wait(jobs, start + limit)
    tally = Tally()
    for output, report, end in zip(outputs, reports, finished, strict=True):
        log.keep("".join(output))
        tally.add(_events(report), end)
    _save(tally, time.monotonic() - start, folder / TALLY)
    return _outcome(tally, finished)


def _wait(jobs: Sequence[Job], end: float) -> list[Finished]:
    finished = []
    for job in jobs:
        finished.append(job.wait(end - time.monotonic()))
        if finished[-1].state == "timeout":  # all at once: each may take its time to end
            for other in jobs:
                other.interrupt()
    return finished


def _shards() -> int:
    return max(1, min(_MOST_SHARDS, (os.cpu_count() or 1) // 2))


def _command(tests: Sequence[str], marker: str, index: int, reports: Sequence[Path]) -> list[str]:
    plugin = ["-p", "benchmarks.gpu.shard", "--shard", f"{index}/{len(reports)}"]
    # a test that hangs says where before its process is stopped
    hanging = ["-o", "faulthandler_timeout=90"]
    options = ["-m", marker, "-rf", "--tb=short", "--continue-on-collection-errors"]
    report = ["-p", "no:cacheprovider", "--report", str(reports[index])]
    return [sys.executable, "-m", "pytest", *plugin, *hanging, *options, *report, *tests]


def _events(report: Path) -> list[dict[str, Any]]:
    if not report.exists():
        return []
    lines = report.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _save(tally: Tally, seconds: float, path: Path) -> None:
    names = ("passed", "failed", "skipped")
    counts = {name: tally.count(name) for name in names}
    path.write_text(json.dumps({**counts, "seconds": round(seconds, 1)}))


def _outcome(tally: Tally, finished: Sequence[Finished]) -> Outcome:
    parts = [f"{tally.count(name)} {name}" for name in ("passed", "failed", "skipped")]
    if tally.missing:
        parts.append(f"{tally.missing} not run")
    broken = [end for end in finished if end.code not in (0, 1, None, _NOTHING_COLLECTED)]
    if broken:
        parts.append(f"{len(broken)} of {len(finished)} processes broke: {broken[0].last_line}")
    lines = [f"{test}: {message}" for test, message in tally.messages.items()]
    state = "ok"
    if any(end.code is None for end in finished):
        state = "timeout"
    elif tally.messages or broken or tally.missing or not tally.count("passed"):
        state = "failed"
    return Outcome(state=state, note=", ".join(parts), lines=lines)
