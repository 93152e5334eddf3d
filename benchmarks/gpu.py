"""``python -m benchmarks.gpu``: tests and benchmarks of a GPU machine, in under nine minutes.

Needs no network and no native extension. Everything goes to the folder that the variable OUT
names, by default ``benchmarks/results``, as it comes: a step that hangs is stopped, and whenever
the job ends, the summary says what there is. The exit code is 1 where a step failed, and 2 where
there is no GPU. As a pytest plugin, the same file runs one of several shards of the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parent.parent
LIMIT = 520.0  # seconds in all
_FACTS, _WHEELS, _TESTS, _REPORT = 90.0, 90.0, 200.0, 45.0  # of which, at most
_AROUND = 60.0  # that the benchmarks need beyond their deadline, to end what they have begun
_GRACE = 8.0  # between the request to stop and the end
_MOST_SHARDS = 8
TESTS = (
    "tests/backends",
    "tests/engine",
    "tests/head",
    "tests/schedule",
    "tests/test_linear_logprobs.py",
    "tests/test_linear_policy_loss.py",
)
_LOOK = """
import importlib.metadata as metadata, platform, torch
torch.ones(1, device="cuda").sum().item()  # it does not only exist
memory = torch.cuda.get_device_properties(0).total_memory / 2**30
versions = [f"{name} {metadata.version(name)}" for name in ("torch", "triton", "transformers")]
print(", ".join([torch.cuda.get_device_name(), f"{memory:.0f} GiB", *versions,
                 f"python {platform.python_version()}"]))
"""


@dataclass(kw_only=True)
class Step:
    """A step and its outcome."""

    name: str
    state: str  # "ok" | "failed" | "timeout"
    seconds: float
    note: str = ""
    lines: Sequence[str] = ()  # for the summary


@dataclass(kw_only=True)
class Job:
    """Runs steps one after the other, each within what is left of the time."""

    out: Path
    log: Path
    scratch: Path
    end: float  # by time.monotonic()
    steps: list[Step] = field(default_factory=list)

    def python(self, words: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Return the exit code, None where it was stopped; and what the log has of it."""
        size = self.log.stat().st_size if self.log.exists() else 0
        (code,) = finish([self.start(words, self.log)], time.monotonic() + limit)
        return code, self.log.read_bytes()[size:].decode(errors="replace")

    def start(self, words: Sequence[str], log: Path, **variables: str) -> Process:
        """Start a Python process, the first of a group of its own."""
        paths = [str(ROOT), str(self.scratch / "site"), os.environ.get("PYTHONPATH", "")]
        variables |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env={**os.environ, **variables}, stdout=file,
                stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, preexec_fn=os.setpgrp,
            )  # fmt: skip

    def step(self, name: str, words: Sequence[str], limit: float) -> str:
        """Run a step of one process, and return its output."""
        start = time.monotonic()
        code, output = self.python(words, min(limit, self.end - start))
        self.done(name, start, state(code), last_line(output))
        return output

    def done(
        self, name: str, start: float, state: str, note: str, lines: Sequence[str] = ()
    ) -> None:
        seconds = time.monotonic() - start
        self.steps.append(Step(name=name, state=state, seconds=seconds, note=note, lines=lines))
        print(f"{name}: {state} after {seconds:.0f} s. {note}", flush=True)


Process = subprocess.Popen[bytes]


def finish(processes: Sequence[Process], end: float) -> list[int | None]:
    """Wait for exit codes. What has not ended is interrupted: pytest then reports what it has.

    Nothing that they started lives on, whatever happens.
    """
    try:
        for process in processes:
            _wait(process, end)
        late = [process for process in processes if process.poll() is None]
        for process in late:
            _signal(process, signal.SIGINT)
        grace = time.monotonic() + _GRACE
        for process in late:
            _wait(process, grace)
        return [None if process in late else process.returncode for process in processes]
    finally:
        for process in processes:
            _signal(process, signal.SIGKILL)
            process.wait()


def _wait(process: Process, end: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, end - time.monotonic()))


def _signal(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def state(code: int | None) -> str:
    return "timeout" if code is None else "failed" if code else "ok"


def last_line(output: str) -> str:
    return (output.strip().splitlines() or [""])[-1]


def install_wheels(job: Job, folder: Path = ROOT / "wheels") -> None:
    """Install what fits this machine, all in one command: packages share name spaces."""
    tags = set(sys_tags())
    every = sorted(folder.glob("*.whl"))
    wheels = [str(path) for path in every if parse_wheel_filename(path.name)[3] & tags]
    if not wheels:
        print("no wheels: baselines run only if they are installed here", flush=True)
        return
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--no-input"]
    target = ["--target", str(job.scratch / "site")]
    job.step("wheels", ["-m", "pip", "install", "-q", *options, *target, *wheels], _WHEELS)


def run_tests(job: Job, tests: Sequence[str] = TESTS, marker: str = "gpu") -> dict[str, Any]:
    """Run the tests in several processes, since most of their work is compilation."""
    start = time.monotonic()
    count = max(1, min(_MOST_SHARDS, (os.cpu_count() or 1) // 2))
    reports = [job.scratch / f"shard-{index}.jsonl" for index in range(count)]
    logs = [report.with_suffix(".txt") for report in reports]
    words = ["-m", "pytest", "-p", "benchmarks.gpu", "-m", marker, "--tb=short", *tests]
    words += ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=90"]
    words += ["--continue-on-collection-errors"]
    shards = [
        job.start(words, log, SHARD=f"{i}/{count}", REPORT=str(report), OMP_NUM_THREADS="2")
        for i, (report, log) in enumerate(zip(reports, logs, strict=True))
    ]
    try:
        codes = finish(shards, min(start + _TESTS, job.end))
    finally:
        outputs = [log.read_text(errors="replace") for log in logs]
        with job.log.open("a") as file:
            file.write("".join(outputs))
    outcomes, failures = _read(reports)
    names = ("passed", "failed", "skipped")
    counts: dict[str, Any] = {name: [*outcomes.values()].count(name) for name in names}
    broken = [said for said, code in zip(outputs, codes, strict=True) if code not in _FINE]
    missed = [*outcomes.values()].count("not run")
    wrong = bool(failures or broken or missed or not counts["passed"])
    note = ", ".join(f"{value} {name}" for name, value in counts.items())
    note += f", {missed} not run" if missed else ""
    note += f"; {len(broken)} of {count} processes broke: {last_line(broken[0])}" if broken else ""
    job.done(
        "tests", start, "timeout" if None in codes else "failed" if wrong else "ok", note, failures
    )
    return {**counts, "seconds": round(time.monotonic() - start, 1)}


_FINE = (0, 1, 5, None)  # exit codes of pytest: passed, failed, nothing collected; stopped


def _read(reports: Sequence[Path]) -> tuple[dict[str, str], list[str]]:
    """Read outcomes by test, and what failed: a test at which its process ended has."""
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    for report in reports:
        for line in report.read_text().splitlines() if report.exists() else []:
            test, outcome, message = json.loads(line)
            if outcomes.get(test) != "failed":  # a failing teardown follows a passed call
                outcomes[test], messages[test] = outcome, message
    for test, outcome in outcomes.items():
        if outcome == "started":
            outcomes[test], messages[test] = "failed", "did not finish"
    failed = (test for test, outcome in outcomes.items() if outcome == "failed")
    return outcomes, [f"{test}: {messages[test]}" for test in failed]


@pytest.hookimpl(trylast=True)  # after the selection by marker
def pytest_collection_modifyitems(items: list[Any]) -> None:
    index, count = map(int, os.environ["SHARD"].split("/"))
    items[:] = items[index::count]
    for item in items:
        _note(item.nodeid, "not run")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _note(report.nodeid, "failed", str(report.longrepr).strip().splitlines()[-1])


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(nodeid, "started")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or not report.passed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _note(report.nodeid, report.outcome, crash.message.splitlines()[0] if crash else "")


def _note(test: str, outcome: str, message: str = "") -> None:
    """Write a line that is complete at once: a kill loses none."""
    with Path(os.environ["REPORT"]).open("a") as file:
        file.write(json.dumps([test, outcome, message[:300]]) + "\n")


def benchmark(job: Job, counts: dict[str, Any]) -> None:
    tests = job.scratch / "tests.json"
    tests.write_text(json.dumps(counts))
    limit = job.end - time.monotonic() - _REPORT
    options = [f"--results={job.out}", f"--tests={tests}", f"--deadline={limit - _AROUND:.0f}"]
    options += ["--benchmark-columns=median,rounds", "--tb=line", "-p", "no:cacheprovider"]
    words = ["-m", "pytest", "benchmarks", "--benchmark-only", "--suite=gpu", *options]
    output = job.step("benchmarks", words, limit)
    lines = [x for x in output.splitlines() if x.startswith(("FAILED", "ERROR"))]
    job.steps[-1].lines = lines


def summary(title: str, job: Job, files: Sequence[Path]) -> Iterator[str]:
    """Write one screen: all that a remote reader may see."""
    yield title
    for step in job.steps:
        yield f"{step.name:<11}{step.state:<8}{step.seconds:5.0f} s  {step.note}"
        shown = step.lines[:12]
        yield from (f"    {line}" for line in shown)
        if len(step.lines) > len(shown):
            yield f"    ... and {len(step.lines) - len(shown)} more"
    yield f"{len(files)} files in {job.out}: {', '.join(path.name for path in files)}"


def main() -> int:
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results").resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started, end = time.time(), time.monotonic() + LIMIT
    log = out / "gpu-log.txt"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(out=out, log=log, scratch=Path(scratch), end=end)
        code, said = job.python(["-c", _LOOK], _FACTS)
        if code != 0:
            print(f"no GPU to measure on: {last_line(said)}")
            return 2
        try:
            install_wheels(job)
            benchmark(job, run_tests(job))
            report = job.step("report", ["-m", "benchmarks.report", str(out)], _REPORT)
            job.steps[-1].lines = report.splitlines()[:-1]
        except KeyboardInterrupt:
            job.done("the job", time.monotonic(), "failed", "interrupted")
        files = [path for path in out.rglob("*") if path.is_file()]
        new = sorted(path for path in files if path.stat().st_mtime >= started - 1)
        for line in summary(last_line(said), job, new):
            print(line[:160])
            with log.open("a") as file:
                file.write(f"{line}\n")
    return 0 if all(step.state == "ok" for step in job.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
