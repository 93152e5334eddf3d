"""``python -m benchmarks.gpu``: tests and benchmarks of a GPU machine, in under nine minutes.

Needs no network and no native extension. Writes into the folder that the variable OUT names, by
default ``benchmarks/results``. The exit code is 1 where a part failed, and 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from benchmarks.gpu.job import ROOT, Finished, Job
from benchmarks.gpu.log import Log
from benchmarks.gpu.parts import Outcome, Part, run_parts
from benchmarks.gpu.summary import summary
from benchmarks.gpu.tests import TALLY, run_tests
from benchmarks.gpu.wheels import install_wheels

WHEELS = ROOT / "wheels"
LOG = "gpu-log.txt"
_LIMIT = 520.0  # seconds in all
_LOOKING = 90.0  # seconds for the facts
_ENDING = 45.0  # seconds that tables and plots may take, and the headline another half of that
# seconds that the benchmarks get beyond their deadline: to start, and to end what they have begun
_AROUND = 60.0


class Run:
    """What the parts share."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch = folder.resolve(), scratch
        self.site = scratch / "site"
        self.started = time.time()
        self.log = Log(self.folder / LOG)
        self.environment = _environment(self.site)

    def python(self, *arguments: str, limit: float, quiet: bool = False) -> Finished:
        """A Python process with its output in the log."""
        write = self.log.keep if quiet else self.log.tee
        with Job([sys.executable, *arguments], self.environment, write) as job:
            return job.wait(limit)

    def new_files(self) -> list[Path]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path for path in files if path.stat().st_mtime >= self.started - 1)


def main() -> int:
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    end = time.monotonic() + arguments.limit
    with tempfile.TemporaryDirectory() as scratch:
        facts = _facts()
        if facts["why_not"]:
            print(f"no GPU to measure on: {facts['why_not']}")
            return 2
        run = Run(arguments.out, Path(scratch))
        run.log.say(facts["line"])
        done = run_parts(parts(run), end, run.log)
        headline = _headline(run)
    run.log.end(summary(facts["line"], done, headline, run.folder, run.new_files()))
    return 0 if all(part.outcome.state == "ok" for part in done) else 1


def parts(run: Run) -> list[Part]:
    """In their order. Of the time, the benchmarks get what is left."""
    wheels = sorted(WHEELS.glob("*.whl"))
    headline = _ENDING / 2

    def install(limit: float) -> Outcome:
        return install_wheels(wheels, run.site, limit, run.log, run.environment)

    def test(limit: float) -> Outcome:
        return run_tests(limit, run.log, run.environment, run.scratch)

    def benchmark(limit: float) -> Outcome:
        return _benchmarks(run, limit)

    def report(limit: float) -> Outcome:
        finished = run.python("-m", "benchmarks.results", str(run.folder), limit=limit)
        return Outcome(state=finished.state, note=finished.why_not)

    return [
        Part(name="wheels", body=install, limit=90.0),
        Part(name="tests", body=test, limit=200.0),
        Part(name="benchmarks", body=benchmark, limit=_LIMIT, reserve=_ENDING + headline),
        Part(name="report", body=report, limit=_ENDING, reserve=headline),
    ]


def _benchmarks(run: Run, limit: float) -> Outcome:
    tests = run.scratch / TALLY
    options = [f"--results={run.folder}", f"--deadline={max(limit - _AROUND, 10.0):.0f}"]
    if tests.exists():
        options.append(f"--tests={tests}")
    suite = ["-m", "pytest", "benchmarks", "--benchmark-only", "--suite=gpu", *options]
    printed = ["--benchmark-columns=median,rounds", "-rf", "--tb=line", "-p", "no:cacheprovider"]
    finished = run.python(*suite, *printed, limit=limit)
    lines = finished.tail.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    note = finished.last_line
    if finished.state == "timeout":
        note = f"{finished.why_not}: {note}"
    return Outcome(state=finished.state, note=note, lines=failed)


def _headline(run: Run) -> list[str]:
    results = [path for path in run.new_files() if path.suffix == ".json"]
    if not results:
        return ["no result file was written"]
    command = ["-m", "benchmarks.gpu.headline", str(results[-1])]
    finished = run.python(*command, limit=_ENDING / 2, quiet=True)
    if finished.state == "ok":
        return finished.tail.splitlines()
    return [f"no headline: {finished.why_not}"]


def _facts() -> dict[str, str]:
    command = [sys.executable, "-m", "benchmarks.gpu.facts"]
    with Job(command, _environment(), write=lambda text: None) as job:
        finished = job.wait(_LOOKING)
    if finished.state == "ok":
        return json.loads(next(x for x in finished.tail.splitlines() if x.startswith("{")))
    return {"why_not": finished.why_not, "line": ""}


def _environment(*folders: Path) -> dict[str, str]:
    """Of the parts. The root comes first: a carried package may bring a folder "tests"."""
    paths = [*map(str, (ROOT, *folders)), os.environ.get("PYTHONPATH", "")]
    python_path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1"}


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # the running job is stopped on the way out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=default, help="folder for everything")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds in all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
