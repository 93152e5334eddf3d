"""Steps in processes of their own, each within what is left of the time, and their summary."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_GRACE = 8.0  # seconds between the request to stop and the end
_SHOWN = 8  # lines of a step in the summary


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

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.end - time.monotonic()

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
        code, output = self.python(words, min(limit, self.left))
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


def summary(title: str, job: Job, files: Sequence[Path]) -> Iterator[str]:
    """Write one screen: all that a remote reader may see."""
    yield title
    for step in job.steps:
        yield f"{step.name:<11}{step.state:<8}{step.seconds:5.0f} s  {step.note}"
        shown = step.lines[:_SHOWN]
        yield from (f"    {line}" for line in shown)
        if len(step.lines) > len(shown):
            yield f"    ... and {len(step.lines) - len(shown)} more"
    yield f"{len(files)} files in {job.out}: {', '.join(path.name for path in files)}"
