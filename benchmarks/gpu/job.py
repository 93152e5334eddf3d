"""A child process whose output is passed on, and which never outlives its time limit."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_GRACE = 8.0  # seconds between the request to stop and the end
_TAIL = 8000  # characters of the output that are kept


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a job ended."""

    code: int | None  # None: it was stopped at its limit
    seconds: float
    tail: str  # end of its output

    @property
    def state(self) -> str:
        if self.code is None:
            return "timeout"
        return "ok" if self.code == 0 else "failed"

    @property
    def why_not(self) -> str:
        """What kept it from ending well; empty where nothing did."""
        if self.state == "timeout":
            return f"stopped after {self.seconds:.0f} s"
        return "" if self.state == "ok" else self.last_line

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.tail.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.code}"


class Job:
    """Runs ``command`` in the repository's root; a context that ends with it stopped."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], write: Callable[[str], None]
    ) -> None:
        self._start = time.monotonic()
        self._write, self._tail = write, ""
        self._interrupted: float | None = None  # when
        self._tree: dict[int, str] = {}  # its descendants at that time
        # It stays in our process group: whoever ends the group from outside ends all of it.
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._stop()

    def wait(self, limit: float) -> Finished:
        """Waits at most ``limit`` seconds, then ends the process and all of its children."""
        try:
            self._process.wait(max(limit, 0.0))
        except subprocess.TimeoutExpired:
            self._stop()
        # a grandchild that lives on may hold the pipe open
        self._reader.join(timeout=2.0)
        code = self._process.returncode if self._interrupted is None else None
        return Finished(code=code, seconds=time.monotonic() - self._start, tail=self._tail)

    def interrupt(self) -> None:
        """Asks it to end: pytest then reports what it has. It does not wait."""
        if self._interrupted is None and self._process.poll() is None:
            self._interrupted = time.monotonic()
            self._tree = _descendants(self._process.pid)
            self._process.send_signal(signal.SIGINT)

    def _stop(self) -> None:
        """Interrupts, and kills what remains of it after the grace."""
        self.interrupt()
        try:
            since = time.monotonic() - (self._interrupted or 0.0)
            self._process.wait(max(_GRACE - since, 0.0))
        except subprocess.TimeoutExpired:
            self._tree |= _descendants(self._process.pid)
            self._process.kill()
            self._process.wait()
        for pid, started in self._tree.items():
            if _started(pid) == started:  # not another process with the same number
                os.kill(pid, signal.SIGKILL)

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while block := os.read(self._process.stdout.fileno(), 1 << 16):
            text = decoder.decode(block)
            self._tail = (self._tail + text)[-_TAIL:]
            self._write(text)


def _descendants(pid: int) -> dict[int, str]:
    """Children of a process, theirs and so on, with the time at which each started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found: dict[int, str] = {}
    pending = [pid]
    while pending:
        parent = pending.pop()
        children = [child for child, its in parents.items() if its == parent]
        pending += children
        found.update({child: start for child in children if (start := _started(child))})
    return found


def _started(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[19] if fields else None


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state, parent, ..."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return None
    return text.rpartition(")")[2].split()
