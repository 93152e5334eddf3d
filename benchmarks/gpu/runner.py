"""Runs jobs one after another, each in a process that is ended at its time limit."""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import record, wheels
from benchmarks.gpu.jobs import Command, Job

_GRACE = 8  # seconds that an ended process has to print where it was
_CARD_SECONDS = 90
_DRY_FACTOR = 3  # times a job's limit: a CPU is slow
_SHOWN = re.compile(r"^(?:FAILED|ERROR|ours\b|=>).*", re.MULTILINE)
_LINES, _WIDTH = 12, 180  # of what is shown of a job
_OF_RUN = ("date", "commit", "modified", "device", "versions")


class NoGPUError(RuntimeError):
    """No GPU computes here."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """The folder of results, the end of a call, and the variables of its jobs."""

    out: Path
    end: float  # by ``time.monotonic()``, of this call
    dry: bool
    variables: dict[str, str]
    machine: dict[str, Any]  # what ``benchmarks.gpu.card`` said

    @property
    def device(self) -> str:
        return self.machine["environment"]["device"]

    def run(self, jobs: Sequence[Job], again: bool) -> int:
        """Run the jobs without a result of these sources, or all; return the exit status.

        Jobs that failed before run after jobs that never ran. A job that may need more than the
        remaining time waits for another call, except the first one.
        """
        known = record.read(self.out)
        todo = [job for job in jobs if again or not self._standing(job, known).done]
        todo.sort(key=lambda job: not again and self._standing(job, known).result == "current")
        waiting = []
        for job in todo:
            left = self.end - time.monotonic()
            seconds = job.seconds * (_DRY_FACTOR if self.dry else 1)
            if left >= seconds or (job is todo[0] and left > 0):
                self._run_one(job, min(seconds, left))
            else:
                waiting.append(job.name)
        lines = record.read(self.out)
        bad = [job.name for job in jobs if not self._standing(job, lines).done]
        bad = [name for name in bad if name not in waiting]
        print(f"failed: {', '.join(bad) or 'none'}", flush=True)
        if waiting:
            print(f"no time for: {', '.join(waiting)}; call again", flush=True)
        return 1 if bad or waiting else 0

    def _standing(self, job: Job, lines: Sequence[record.Line]) -> record.Standing:
        return record.standing(job, lines, self.device)

    def _run_one(self, job: Job, seconds: float) -> None:
        """Run a job, print what it found, and record how it ended."""
        command = job.dry if self.dry else job.command
        variables = self.variables | ({"TRITON_INTERPRET": "1"} if command.interprets else {})
        print(f"\n{job.name}: at most {seconds:.0f} s", flush=True)
        log = self.out / "gpu-logs" / f"{job.name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        sources, start = record.fingerprint(job), time.monotonic()
        state = _run(self._words(command), log, seconds, variables)
        took = time.monotonic() - start
        text = log.read_text(errors="replace")
        facts = {name: self.machine["environment"][name] for name in _OF_RUN}
        facts["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        ended = {"state": state, "seconds": round(took, 1), "said": _last(text)}
        record.append(self.out, {"job": job.name, **ended, "sources": sources, **facts})
        for line in _SHOWN.findall(text)[-_LINES:]:
            print(line[:_WIDTH])
        print(f"{job.name}: {state} after {took:.0f} s: {_last(text)}", flush=True)

    def _words(self, command: Command) -> list[str]:
        workers = self.machine["workers"] if command.parallel else 0
        words = [word.format(out=self.out) for word in command.words]
        return [sys.executable, *words, *(["-n", str(workers)] if workers > 1 else [])]


def make_runner(out: Path, limit: float, dry: bool) -> Runner:
    """Inspect the machine; everything must end ``limit`` seconds from now.

    Raises:
        NoGPUError: no GPU computes; the message is torch's.
    """
    end, variables = time.monotonic() + limit, _variables(out, dry)
    command = [sys.executable, "-m", "benchmarks.gpu.card", *["--dry"] * dry]
    done = subprocess.run(
        command,
        cwd=record.ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=_CARD_SECONDS,
        check=False,
    )
    if done.returncode:
        raise NoGPUError(f"no GPU to measure on: {_last(done.stderr)}")
    machine = json.loads(done.stdout.splitlines()[-1])
    facts = machine["environment"]
    print(f"{facts['device']}, {facts['memory_gib']} GiB, torch {facts['versions']['torch']}")
    return Runner(out=out, end=end, dry=dry, variables=variables, machine=machine)


def _variables(out: Path, dry: bool) -> dict[str, str]:
    site = wheels.unpacked()
    paths = [str(record.ROOT), os.environ.get("PYTHONPATH", ""), str(site or "")]
    variables = {
        **os.environ,
        "OUT": str(out),
        "COLUMNS": "200",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    kernels = Path(tempfile.gettempdir()) / "grpo-kernels-triton"  # compiled; for the next call
    variables.setdefault("TRITON_CACHE_DIR", str(kernels))
    if dry:
        return variables | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return variables


def _run(command: Sequence[str], log: Path, seconds: float, variables: dict[str, str]) -> str:
    """Run a command; return "ok", "failed", or "ended" if it ran for too long."""
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            cwd=record.ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its children end with it
        ) as process,
    ):
        try:
            return "failed" if process.wait(seconds) else "ok"
        except subprocess.TimeoutExpired:
            _end(process)
            return "ended"
        except KeyboardInterrupt:
            _end(process)
            raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process and its children, and kill those that continue."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _last(text: str) -> str:
    lines = [line.strip(" =") for line in text.splitlines() if line.strip(" =")]
    return lines[-1][:_WIDTH] if lines else "nothing was printed"
