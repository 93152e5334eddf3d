"""The steps of the job: a part of the plan, wheels, benchmarks, their report, and the tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from benchmarks.gpu.job import ROOT, Job, Step
from benchmarks.gpu.plan import LIMIT, SHOWN, Part

_WHEELS, _BENCHMARKS, _REPORT = 30.0, 190.0, 30.0  # seconds, at most
_AROUND = 60.0  # that the benchmarks need beyond their deadline, to end what they have begun
_START = 10.0  # that a part's process may take until it begins, of its seconds
_MOST_PROCESSES = 8
_PYTEST = ("-m", "pytest", "-p", "no:cacheprovider")
TESTS = (
    "tests/backends",
    "tests/engine",
    "tests/head",
    "tests/schedule",
    "tests/test_linear_logprobs.py",
    "tests/test_linear_policy_loss.py",
)


def install_wheels(job: Job, folder: Path = ROOT / "wheels") -> None:
    """Install what fits this machine, all in one command: packages share name spaces."""
    tags = set(sys_tags())
    every = sorted(folder.glob("*.whl"))
    wheels = [str(path) for path in every if parse_wheel_filename(path.name)[3] & tags]
    if not wheels:
        print("no wheels: baselines run only if they are installed here", flush=True)
        return
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--no-input"]
    target = ["--target", str(job.site)]
    job.step("wheels", ["-m", "pip", "install", "-q", *options, *target, *wheels], _WHEELS)


def run_part(job: Job, part: Part, small: bool) -> None:
    """Run a part of the plan; what it says of itself and of failures goes into the summary."""
    if part.tests:
        if not small:
            run_tests(job, part.tests, name=part.name, limit=part.seconds)
        return
    seconds = min(part.seconds, job.left) - _START
    words = ["-m", "benchmarks.gpu.part", part.name, "--out", str(job.out)]
    words += [f"--seconds={seconds:.0f}", *(["--small"] if small else [])]
    _shown(job, part.name, words, part.seconds)


def run_tests(
    job: Job,
    tests: Sequence[str] = TESTS,
    marker: str = "gpu",
    name: str = "tests",
    limit: float = LIMIT,
) -> None:
    """Run the tests in several processes, since most of their work is compilation."""
    words = [*_PYTEST, "-m", marker, "--tb=short", "-rfE", *tests]
    words += ["--continue-on-collection-errors", "-o", "faulthandler_timeout=90"]
    if _importable(job, "xdist"):
        words += ["-n", str(max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2)))]
    _shown(job, name, words, limit)


def benchmark(job: Job) -> None:
    """Run the suite's first tables, against the baselines that are here."""
    limit = min(_BENCHMARKS, job.left - _REPORT)
    words = [*_PYTEST, "benchmarks", "--benchmark-only", "--suite=gpu", f"--results={job.out}"]
    words += [f"--deadline={limit - _AROUND:.0f}", "--benchmark-columns=median,rounds", "--tb=line"]
    _shown(job, "benchmarks", words, limit)


def report(job: Job) -> None:
    """Make tables and plots of what has been measured, if what reads the files is here."""
    if not _importable(job, "msgspec"):
        why = "left out: msgspec is not installed; python -m benchmarks.report FOLDER makes it"
        job.steps.append(Step(name="report", state="ok", seconds=0.0, note=why))
        return
    said = job.step("report", ["-m", "benchmarks.report", str(job.out)], _REPORT)
    job.steps[-1].lines = said.splitlines()[:-1]


def _importable(job: Job, package: str) -> bool:
    """Return whether the steps can import it, from this environment or from the wheels."""
    return bool(importlib.util.find_spec(package) or list(job.site.glob(package)))


def _shown(job: Job, name: str, words: Sequence[str], limit: float) -> None:
    """Run a step, some of whose lines go into the summary: failures first."""
    lines = [x for x in job.step(name, words, limit).splitlines() if x.startswith(SHOWN)]
    job.steps[-1].lines = sorted(lines, key=lambda line: line.startswith(SHOWN[-1]))
