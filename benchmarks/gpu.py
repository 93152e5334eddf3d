"""``python -m benchmarks.gpu``: tests and benchmarks of a GPU machine, in under nine minutes.

Needs no network and no native extension. Everything goes to the folder that the variable OUT
names, by default ``benchmarks/results``, as it comes: a step that hangs is stopped, and whenever
the job ends, the summary says what there is. The exit code is 1 where a step failed, and 2 where
there is no GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parent.parent
LIMIT = 520.0  # seconds in all
_FACTS, _WHEELS, _TESTS, _REPORT = 90.0, 90.0, 200.0, 45.0  # of which, at most
_AROUND = 60.0  # that the benchmarks need beyond their deadline, to end what they have begun
_GRACE = 8.0  # between the request to stop and the end
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

    @property
    def site(self) -> Path:
        """Where the wheels are installed."""
        return self.scratch / "site"

    def python(self, words: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Return the exit code, None where it was stopped; and what the log has of it."""
        size = self.log.stat().st_size if self.log.exists() else 0
        paths = [str(ROOT), str(self.site), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        variables["COLUMNS"] = "200"  # pytest cuts what it says of a failure
        with self.log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env={**os.environ, **variables}, stdout=file,
                stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, preexec_fn=os.setpgrp,
            )  # fmt: skip
        code = finish(process, limit)
        return code, self.log.read_bytes()[size:].decode(errors="replace")

    def step(self, name: str, words: Sequence[str], limit: float) -> str:
        """Run a step of one process, and return its output."""
        start = time.monotonic()
        code, output = self.python(words, min(limit, self.end - start))
        state = "timeout" if code is None else "failed" if code else "ok"
        seconds = time.monotonic() - start
        self.steps.append(Step(name=name, state=state, seconds=seconds, note=last_line(output)))
        print(f"{name}: {state} after {seconds:.0f} s. {last_line(output)}", flush=True)
        return output


def finish(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """Wait for the exit code. What has not ended is interrupted: pytest then reports what it has.

    Nothing that it started lives on, whatever happens.
    """
    try:
        return process.wait(max(0.0, limit))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_line(output: str) -> str:
    return (output.strip().splitlines() or [""])[-1].strip("= ")


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


def run_tests(job: Job, tests: Sequence[str] = TESTS, marker: str = "gpu") -> None:
    """Run the tests in several processes, since most of their work is compilation."""
    words = [*_PYTEST, "-m", marker, "--tb=short", "-rfE", *tests]
    words += ["--continue-on-collection-errors", "-o", "faulthandler_timeout=90"]
    if importlib.util.find_spec("xdist") or list(job.site.glob("xdist")):
        words += ["-n", str(max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2)))]
    _pytest(job, "tests", words, _TESTS)


def benchmark(job: Job) -> None:
    limit = job.end - time.monotonic() - _REPORT
    words = [*_PYTEST, "benchmarks", "--benchmark-only", "--suite=gpu", f"--results={job.out}"]
    words += [f"--deadline={limit - _AROUND:.0f}", "--benchmark-columns=median,rounds", "--tb=line"]
    _pytest(job, "benchmarks", words, limit)


def _pytest(job: Job, name: str, words: Sequence[str], limit: float) -> None:
    """Run a step of pytest, whose failures go into the summary."""
    output = job.step(name, words, limit)
    job.steps[-1].lines = [x for x in output.splitlines() if x.startswith(("FAILED", "ERROR"))]


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
            run_tests(job)
            benchmark(job)
            report = job.step("report", ["-m", "benchmarks.report", str(out)], _REPORT)
            job.steps[-1].lines = report.splitlines()[:-1]
        except KeyboardInterrupt:
            job.steps.append(Step(name="the job", state="failed", seconds=0.0, note="interrupted"))
        files = [path for path in out.rglob("*") if path.is_file()]
        new = sorted(path for path in files if path.stat().st_mtime >= started - 1)
        for line in summary(last_line(said), job, new):
            print(line[:160])
            with log.open("a") as file:
                file.write(f"{line}\n")
    return 0 if all(step.state == "ok" for step in job.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
